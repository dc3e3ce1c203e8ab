"""Packages that cannot live in our environment. Each has one of its own, and is talked to over HTTP."""
