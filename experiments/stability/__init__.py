"""Where each placement trains, over depth, rate and warm-up."""
