"""Training on one GPU: is it right, how fast is it, what does it need? Apart from the other benches, because it runs where those
cannot: `python -m benchmarks.gpu` needs no Ray, no MLflow and no network, and ends within eight minutes.
"""
