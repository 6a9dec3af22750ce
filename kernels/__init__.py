"""Fast twins (Numba) of the byte transforms; they know no models, devices or options. Installed as refimpl.kernels."""
