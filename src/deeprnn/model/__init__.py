"""What a model is: units, equations, operators ⊕ and ▷, layers and whole models, their losses and metrics."""
