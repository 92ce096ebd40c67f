"""Published quantitative results, each measured again at a size that a small machine can hold."""
