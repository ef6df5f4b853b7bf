"""Keep the activations at a frozen boundary, by sample, and train the rest of the model on them."""
