"""--host and --port as an address that a socket takes: one reading for learner, samplers and doctor.

A host is an IPv4 or IPv6 address (::1, or [::1]) or a name. A name is looked up at the start, so a wrong one is told at
once and not by a wait; where it has both kinds of address the IPv4 one counts, as both sides must agree on one.
"""

import errno
import ipaddress
import socket


def tcp(host: str, port: int) -> str:
    """ZeroMQ's address: tcp://127.0.0.1:5555 or tcp://[::1]:5555.

    Raises:
        ValueError: `host` is no address and no name that this machine knows; the sentence begins with --host.
    """
    address = numeric(host)
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def numeric(host: str) -> str:
    """The address of a host, without brackets; ValueError as for `tcp`."""
    return _lookup(host)[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, all addresses of the name considered; ValueError as for `tcp`."""
    found = [ipaddress.ip_address(address) for address in _lookup(host)]
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in found)


def check_reachable(host: str) -> None:
    """ValueError where no packet can be sent to `host` from here: as for `tcp`, and without a route to it."""
    address = numeric(host)
    try:
        with _socket_for(address, socket.SOCK_DGRAM) as probe:
            probe.connect(_name(address, 9))  # of a datagram socket: only looks for a route, sends nothing
    except OSError as error:
        raise ValueError(f"--host {host} cannot be reached from this machine: {error.strerror}") from error


def check_free(host: str, port: int) -> None:
    """ValueError where this machine cannot listen at `host` and `port` now."""
    address = numeric(host)
    try:
        with _socket_for(address, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(_name(address, port))
    except OSError as error:
        raise ValueError(cannot_listen(f"--host {host} --port {port}", error.errno, error.strerror)) from error


def cannot_listen(place: str, number: int, text: str) -> str:
    """The sentence for an errno of `bind`, with the flag to change."""
    if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"cannot listen at {place}: this machine has no such address; choose another --host"
    return f"cannot listen at {place}: {text}; end what uses it (a learner?), or choose another --port for both sides"


def _lookup(host: str) -> list[str]:
    """Every address of a host, IPv4 first."""
    _check_form(host)
    try:
        found = socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--host {host} is no address and no name that is known here: {reason}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(_with_zone(*entry[4]) for entry in found))


def _check_form(host: str) -> None:
    """ValueError, which says what to write, for what is more or less than a host."""
    if not host.strip():
        raise ValueError("--host is empty: give an address or a name, or leave it out for this machine alone")
    if "/" in host:
        rest = host.partition("://")[2] or host
        raise ValueError(f"--host {host} is a URL: give the address or name alone, as in --host {_host_of(rest)}")
    if _host_of(host) != host:
        number = host.rpartition(":")[2] or "PORT"
        raise ValueError(f"--host {host} has a port in it: give --host {_host_of(host)} --port {number}")


def _host_of(text: str) -> str:
    """The host in HOST, HOST:PORT, [IPv6]:PORT and the same with a path."""
    text = text.partition("/")[0]
    if text.startswith("[") and "]" in text:
        return text.partition("]")[0] + "]"
    return text.partition(":")[0] if text.count(":") == 1 else text


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _with_zone(address: str, port: int, flow: int = 0, zone: int = 0) -> str:
    """A link-local address with the interface it goes through, for it means nothing without."""
    return f"{address}%{socket.if_indextoname(zone)}" if zone and "%" not in address else address


def _name(address: str, port: int) -> tuple:
    """The socket address, zone included."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4]


def _socket_for(address: str, kind: int) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
