"""One stage and one run: keys, look up, build, publish; what keeps, compares and reproduces runs."""
