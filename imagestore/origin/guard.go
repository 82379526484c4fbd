package origin

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"drover.io/drover/api"
)

// inside lists blocks of addresses that lead into this machine, its network or its cloud, with their names. The
// standard library knows the others: loopback, private, link-local, multicast.
var inside = []struct {
	block netip.Prefix
	name  string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this host"}, // connecting to 0.0.0.0 is connecting to loopback
	{netip.MustParsePrefix("100.64.0.0/10"), "a provider's private address"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's own address"}, // a host agent, with secrets
	{netip.MustParsePrefix("192.0.0.0/24"), "a reserved address"},
	{netip.MustParsePrefix("198.18.0.0/15"), "a test network's address"},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address"},
	{netip.MustParsePrefix("fec0::/10"), "a private address"}, // site-local, out of use
	{netip.MustParsePrefix("64:ff9b:1::/48"), "a translated private address"},
	{netip.MustParsePrefix("2001::/32"), "a Teredo tunnel's address"},
}

// carriers are IPv6 blocks whose addresses hold an IPv4 address. Packets end at the IPv4 address.
var carriers = []struct {
	block netip.Prefix
	at    int // byte of the IPv4 address
}{
	{netip.MustParsePrefix("64:ff9b::/96"), 12}, // NAT64
	{netip.MustParsePrefix("2002::/16"), 2},     // 6to4
	{netip.MustParsePrefix("::/96"), 12},        // IPv4-compatible, out of use
}

// Inside names the kind of an address outside the public internet ("a private address"), or returns "".
func Inside(addr netip.Addr) string {
	addr = addr.WithZone("").Unmap()
	switch {
	case !addr.IsValid():
		return "no address"
	case addr.IsUnspecified():
		return "an address of this host"
	case addr.IsLoopback():
		return "a loopback address"
	case addr.IsPrivate():
		return "a private address"
	case addr.IsLinkLocalUnicast():
		return "a link-local address"
	case addr.IsMulticast():
		return "a multicast address"
	}
	for _, b := range inside {
		if b.block.Contains(addr) {
			return b.name
		}
	}
	for _, c := range carriers {
		if c.block.Contains(addr) {
			b := addr.As16()
			return Inside(netip.AddrFrom4([4]byte(b[c.at : c.at+4])))
		}
	}
	return ""
}

// checkAddress returns nil for an address of the public internet and for an address that allow (nil: none) accepts.
func checkAddress(addr netip.Addr, allow func(netip.Addr) bool) error {
	what := Inside(addr)
	if what == "" || allow != nil && allow(addr.WithZone("").Unmap()) {
		return nil
	}
	return api.Errorf(api.Denied, "%s is %s: Drover fetches images from such an address only if the setting "+
		"allow-private-image-sources is true", addr, what)
}

// Guard is the Control function of a net.Dialer that connects to the public internet and to addresses that allow (nil:
// none) accepts. Guard sees the address of the connection itself, and so covers literal addresses, the current answer
// of the resolver, and targets of redirects. A refusal is an error of kind denied.
func Guard(allow func(netip.Addr) bool) func(network, address string, _ syscall.RawConn) error {
	return func(network, address string, _ syscall.RawConn) error {
		if !strings.HasPrefix(network, "tcp") {
			return api.Errorf(api.Denied, "%s %s: images are fetched over TCP alone", network, address)
		}
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return api.Errorf(api.Denied, "%q is no network address", address)
		}
		return checkAddress(at.Addr(), allow)
	}
}

// GuardTransport guards the connections of a transport, except connections to its proxies: the administrator of this
// process chose the proxies, often with private addresses. A proxy resolves names and connects by itself, so the
// transport checks literal addresses, and the addresses that this node finds for a name, before a request to a proxy.
func GuardTransport(tr *http.Transport, allow func(netip.Addr) bool) {
	open := &net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	guarded := *open
	guarded.Control = Guard(allow)
	var proxies sync.Map // host:port of every proxy in use
	tr.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if _, ok := proxies.Load(address); ok {
			return open.DialContext(ctx, network, address)
		}
		return guarded.DialContext(ctx, network, address)
	}
	choose := tr.Proxy
	if choose == nil {
		return
	}
	tr.Proxy = func(req *http.Request) (*url.URL, error) {
		proxy, err := choose(req)
		if err != nil || proxy == nil {
			return proxy, err
		}
		if err := checkHost(req.Context(), req.URL.Hostname(), allow); err != nil {
			return nil, err
		}
		port := proxy.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[proxy.Scheme]
		}
		proxies.Store(net.JoinHostPort(proxy.Hostname(), port), true)
		return proxy, nil
	}
}

// checkHost checks a host before a proxy connects there. The proxy judges a name without an address on this node.
func checkHost(ctx context.Context, host string, allow func(netip.Addr) bool) error {
	if addr, err := netip.ParseAddr(host); err == nil {
		return checkAddress(addr, allow)
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil //nolint:nilerr // networks behind a proxy often resolve no outside names
	}
	for _, addr := range addrs {
		if err := checkAddress(addr, allow); err != nil {
			return api.Errorf(api.Denied, "host %s: %w", host, err)
		}
	}
	return nil
}
