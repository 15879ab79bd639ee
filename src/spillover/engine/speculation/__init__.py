"""Speculation: draft tokens are verified in the same steps as other rows, and accepted if the model samples them."""
