"""The routes and what they make of requests and answers."""
