"""The quantisation settings of checkpoints: one file per `quant_method`, which chooses a format for each linear."""
