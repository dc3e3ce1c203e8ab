"""Code of a user's own: found without running it, loaded, and named when it fails."""
