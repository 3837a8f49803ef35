"""Methods of the experts of a layer, by the format of their weights: their parameters, and what is made of them."""
