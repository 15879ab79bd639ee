"""What checkpoints say of their quantisation: one file per `quant_method`, which chooses a format for each linear."""
