"""The routes, one file a group of paths; `requests` has what they make of a body, `answers` what they send back."""
