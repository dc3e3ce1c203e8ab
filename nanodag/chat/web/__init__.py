"""The chat page: static files that speak the OpenAI API, and the few routes that they need beside it."""
