"""--host: each form of a host becomes one address for both sides, or a sentence that says what to write."""

import socket
import time

import pytest
from test_channel import answer, wire  # noqa: F401  (wire is a fixture)
from tiny import free_port

import sampling_worker
import training_worker
from grpo.address import check_free, check_reachable, is_loopback, numeric, tcp
from grpo.keys import make_keys

HAS_IPV6 = socket.has_ipv6 and "::1" in {entry[4][0] for entry in socket.getaddrinfo(None, 1)}


@pytest.mark.parametrize("host, address, only_here", [
    ("127.0.0.1", "tcp://127.0.0.1:5555", True),
    ("localhost", "tcp://127.0.0.1:5555", True),  # and not ::1, where the other side does not listen
    ("127.1", "tcp://127.0.0.1:5555", True),
    ("::1", "tcp://[::1]:5555", True),
    ("[::1]", "tcp://[::1]:5555", True),
    ("0:0:0:0:0:0:0:1", "tcp://[::1]:5555", True),
    ("::ffff:127.0.0.1", "tcp://[::ffff:127.0.0.1]:5555", True),
    ("0.0.0.0", "tcp://0.0.0.0:5555", False),
    ("::", "tcp://[::]:5555", False),
    ("192.0.2.7", "tcp://192.0.2.7:5555", False),
    ("2001:db8::7", "tcp://[2001:db8::7]:5555", False),
])  # fmt: skip
def test_hosts_and_their_addresses(host, address, only_here):
    assert tcp(host, 5555) == address and is_loopback(host) is only_here


NO_HOSTS = {
    "": "--host is empty",
    "  ": "--host is empty",
    "http://learner:5555/": "is a URL: give the address or name alone, as in --host learner",
    "tcp://[::1]:5555": "is a URL: give the address or name alone, as in --host [::1]",
    "learner/x": "is a URL",
    "127.0.0.1:5555": "has a port in it: give --host 127.0.0.1 --port 5555",
    "learner:": "has a port in it: give --host learner --port PORT",
    "[::1]:5555": "has a port in it: give --host [::1] --port 5555",
    "no.such.host.invalid": "is no address and no name that is known here",
    "256.0.0.1": "is no address and no name",
    ":::": "is no address and no name",
    "a..b": "is no address and no name",
    "x" * 70: "is no address and no name",
    "*": "is no address and no name",
}


@pytest.mark.parametrize("side", [training_worker, sampling_worker])
@pytest.mark.parametrize("host, words", NO_HOSTS.items(), ids=lambda text: text[:12])
def test_what_is_no_host_is_a_sentence_at_the_start_of_both_sides(side, host, words, capsys):
    started = time.monotonic()
    with pytest.raises(SystemExit):
        side.parse_args(["--host", host, *([] if side is training_worker else ["--device", "cpu"])])
    printed = capsys.readouterr().err
    assert "error: --host" in printed and words in printed and time.monotonic() - started < 60


def test_a_wider_host_needs_keys_and_evaluation_needs_no_host(capsys, monkeypatch):
    for host in ("::", "0.0.0.0"):
        with pytest.raises(SystemExit):
            training_worker.parse_args(["--host", host])
        assert f"--host {host} lets other machines in" in capsys.readouterr().err
    assert training_worker.parse_args(["--host", "::", "--keys", "keys"]).host == "::"
    assert sampling_worker.parse_args(["--device", "cpu", "--evaluate", "--host", "no.such.host.invalid"]).evaluate
    monkeypatch.setenv("RANK", "3")  # perhaps on a machine that does not know the first one by this name
    assert training_worker.parse_args(["--host", "no.such.host.invalid"])


def test_an_address_of_another_machine_is_no_place_to_listen():
    with pytest.raises(ValueError, match="cannot listen at --host 192.0.2.7 .* no such address; choose another --host"):
        check_free("192.0.2.7", free_port())
    in_use = pytest.raises(ValueError, match="end what uses it .* choose another --port")
    with socket.create_server(("127.0.0.1", 0)) as server, in_use:
        check_free("localhost", server.getsockname()[1])
    check_reachable("127.0.0.1")


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_a_step_goes_round_over_ipv6(wire, host, with_keys, tmp_path):  # noqa: F811
    port = free_port()
    check_free(host, port)
    check_reachable(host)
    wire.address = tcp(host, port)
    keys = tmp_path / "keys" if with_keys else None
    if keys:
        make_keys(keys)
    collector, learner = wire.learner(keys=keys)
    with pytest.raises(ValueError, match="cannot listen"):
        check_free(host, port)
    sampler = wire.sampler(keys=keys)
    sampler.connect()
    for ticket in next(sampler.tickets(capacity=2)):
        sampler.send(ticket.ticket_id, answer(ticket))
    assert [group.ticket_id for group in collector.next_step(wait=30)] == [0, 1]
    assert numeric(host) == "::1"
