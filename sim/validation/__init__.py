"""Models against measurements: `files` compares folders of them, `runs` simulates what one row measured, `fit_stacks`
fits what the serving stacks add, and `live` runs transformers on this machine beside their simulation."""
