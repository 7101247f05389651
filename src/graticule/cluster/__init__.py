"""What machines hold and do: devices, for plans that are made without them."""

from graticule.cluster.devices import Device, device, device_names, measured_cpu

__all__ = ["Device", "device", "device_names", "measured_cpu"]
