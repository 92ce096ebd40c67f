"""The geometry of normalization in pictures, every meaningful coordinate computed."""
