"""The training and scoring loops: plain functions that import no ray, so that any launcher can run them."""
