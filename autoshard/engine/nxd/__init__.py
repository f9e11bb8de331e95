"""Plans on Trainium through neuronx-distributed (NxD); ``library`` is the only module that imports it."""
