"""What is measured inside a model across its layers while it trains."""
