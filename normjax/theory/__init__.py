"""Random-matrix laws to lay beside measured spectra."""
