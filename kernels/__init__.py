"""Fast twins (Numba) of the byte transforms of refimpl. Installed as refimpl.kernels; knows no models, devices or options."""
