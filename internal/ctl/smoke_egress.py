# Looks from inside at a sandbox's way out: that it leads nowhere but where it was allowed to, and to no address that nothing
# may allow. Lines are as those of smoke.py.
import ipaddress
import os
import socket


def report(name, bad, detail):
    print(name, "failed" if bad else "ok", "; ".join(bad) if bad else detail, sep="\t")


def connect(target):
    """What the proxy answers to a CONNECT: the status and the reason."""
    with socket.create_connection(("127.0.0.1", 3128), 15) as s:
        s.settimeout(40)
        s.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            more = s.recv(4096)
            if not more:
                break
            head += more
    lines = head.decode("latin-1").split("\r\n")
    fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    return lines[0].split(" ")[1] if " " in lines[0] else "", fields.get("x-egress-reason", "")


def egress_refuses():
    bad = []
    got = connect("denied.boxed-smoke.invalid:443")
    if got != ("403", "not_listed"):
        bad.append(f"a host that is not allowed was answered with {got}")
    try:
        bad.append("a name that is not allowed is " + socket.getaddrinfo("denied.boxed-smoke.invalid", 443)[0][4][0])
    except socket.gaierror:
        pass
    report("egress_refuses", bad, "a host that is not allowed is refused, and its name unknown")


def egress_names():
    bad = []
    try:
        address = socket.getaddrinfo("boxed-smoke.invalid", 443, type=socket.SOCK_STREAM)[0][4][0]
        if ipaddress.ip_address(address) not in ipaddress.ip_network("127.64.0.0/10"):
            bad.append("an allowed name is at " + address)
    except socket.gaierror as e:
        address = "none"
        bad.append(f"an allowed name has no address: {e}")
    report("egress_names", bad, f"an allowed name is at {address}, of loopback")


def egress_addresses():
    bad = []
    for target in ("169.254.169.254:80", "100.100.100.100:443", "127.0.0.1:8080", "[::1]:8080"):
        got = connect(target)
        if got != ("403", "never_address"):
            bad.append(f"{target}, which was allowed, was answered with {got}")
    report("egress_addresses", bad, "this host, the tailnet and the metadata service are refused though they were allowed")


def egress_credentials():
    print("egress_credentials", os.environ.get("BOXED_SMOKE_SECRET", ""), "", sep="\t")


for check in (egress_refuses, egress_names, egress_addresses, egress_credentials):
    try:
        check()
    except Exception as e:  # a check that breaks has failed
        report(check.__name__, [f"{type(e).__name__}: {e}"], "")
