"""Reading of GGUF files: header, configuration, tokenizer, tensors and quantised codes."""
