"""Addresses to listen on, as `serve` and `dashboard` take them with --host."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is only reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
