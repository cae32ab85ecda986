"""Models against measurements.

`files` compares folders of them, `tables` writes down how far off they are, `runs` simulates what a row measured, `fit_stacks`
fits what serving stacks add, and `live` runs transformers (`live_models`) on this machine beside their simulation.
"""
