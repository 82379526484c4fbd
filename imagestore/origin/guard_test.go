package origin

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"drover.io/drover/api"
)

func TestInside(t *testing.T) {
	for addr, inside := range map[string]bool{
		"8.8.8.8": false, "1.1.1.1": false, "172.15.255.255": false, "172.32.0.1": false, "100.63.0.1": false,
		"100.128.0.1": false, "169.253.0.1": false, "2606:4700::1111": false, "64:ff9b::808:808": false,
		"2002:808:808::1": false, "::ffff:8.8.8.8": false,

		"127.0.0.1": true, "127.8.9.1": true, "::1": true, "::": true, "0.0.0.0": true, "0.1.2.3": true,
		"10.0.0.1": true, "172.16.0.1": true, "172.31.255.255": true, "192.168.1.1": true,
		"169.254.169.254": true, "fe80::1": true, "fe80::1%eth0": true, "fd00:ec2::254": true, "fc00::1": true,
		"100.100.100.200": true, "168.63.129.16": true, "192.0.0.192": true, "198.18.0.1": true,
		"224.0.0.1": true, "ff02::1": true, "255.255.255.255": true, "240.0.0.1": true, "fec0::1": true,
		// The same addresses embedded in IPv6.
		"::ffff:127.0.0.1": true, "::ffff:169.254.169.254": true, "64:ff9b::a9fe:a9fe": true,
		"64:ff9b::7f00:1": true, "2002:7f00:1::": true, "2002:c0a8:101::1": true, "::10.0.0.1": true,
		"2001:0:7f00:1::": true,
	} {
		if got := Inside(netip.MustParseAddr(addr)); got != "" != inside {
			t.Errorf("%s: got %q, want inside %v", addr, got, inside)
		}
	}
	if Inside(netip.Addr{}) == "" {
		t.Error("no address at all counts as public")
	}
}

func TestGuard(t *testing.T) {
	one := func(a netip.Addr) bool { return a == netip.MustParseAddr("10.1.2.3") }
	for _, c := range []struct {
		network, address string
		allow            func(netip.Addr) bool
		ok               bool
	}{
		{"tcp4", "8.8.8.8:443", nil, true},
		{"tcp6", "[2606:4700::1111]:443", nil, true},
		{"tcp4", "10.1.2.3:80", nil, false},
		{"tcp4", "10.1.2.3:80", one, true},
		{"tcp6", "[::ffff:10.1.2.3]:80", one, true},
		{"tcp4", "10.1.2.4:80", one, false},
		{"tcp6", "[fe80::1%lo]:80", one, false},
		{"udp4", "8.8.8.8:53", nil, false},
		{"unix", "/run/docker.sock", nil, false},
		{"tcp", "not an address", nil, false},
	} {
		err := Guard(c.allow)(c.network, c.address, nil)
		if (err == nil) != c.ok || err != nil && !api.Is(err, api.Denied) {
			t.Errorf("%s %s: got %v, want ok %v", c.network, c.address, err, c.ok)
		}
	}
}

// guarded is a client with a transport which connects by Guard.
func guarded(t *testing.T, tr *http.Transport, allow func(netip.Addr) bool) *http.Client {
	t.Helper()
	tr.DisableKeepAlives = true
	GuardTransport(tr, allow)
	return &http.Client{Transport: tr}
}

func loopbackOnly(a netip.Addr) bool { return a == netip.MustParseAddr("127.0.0.1") }

func TestGuardTransport(t *testing.T) {
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path)
		if to := r.URL.Query().Get("to"); to != "" {
			http.Redirect(w, r, to, http.StatusFound)
		}
	}))
	t.Cleanup(s.Close)
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	for _, c := range []struct {
		name, url string
		allow     func(netip.Addr) bool
		ok        bool
	}{
		{"a literal address", s.URL, nil, false},
		{"what a name resolves to", "http://localhost:" + port, nil, false},
		{"an allowed address", s.URL, loopbackOnly, true},
		{"a redirect from an allowed one", s.URL + "?to=http://127.0.0.2:" + port + "/inner", loopbackOnly, false},
		{"a redirect to another family", s.URL + "?to=http://[::1]:" + port + "/inner", loopbackOnly, false},
		{"a redirect to the metadata service", s.URL + "?to=http://169.254.169.254/inner", loopbackOnly, false},
	} {
		resp, err := guarded(t, &http.Transport{}, c.allow).Get(c.url)
		if err == nil {
			resp.Body.Close()
		}
		if (err == nil) != c.ok || err != nil && !api.Is(err, api.Denied) {
			t.Errorf("%s: got %v, want ok %v", c.name, err, c.ok)
		}
	}
	for _, p := range asked {
		if p == "/inner" {
			t.Error("a refused address was asked")
		}
	}
}

func TestGuardTransportBehindAProxy(t *testing.T) {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "through the proxy to "+r.URL.Host)
	}))
	t.Cleanup(proxy.Close)
	at, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	// The proxy is on a loopback address, which no source may use.
	client := guarded(t, &http.Transport{Proxy: http.ProxyURL(at)}, nil)
	resp, err := client.Get("http://images.invalid/x")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "through the proxy to images.invalid" {
		t.Fatalf("got %q: %v", b, err)
	}
	for _, target := range []string{"http://169.254.169.254/latest", "http://localhost/", "http://10.0.0.1/"} {
		resp, err := client.Get(target)
		if err == nil {
			resp.Body.Close()
		}
		if !api.Is(err, api.Denied) || !strings.Contains(err.Error(), "allow-private-image-sources") {
			t.Errorf("%s: got %v, want that it is refused", target, err)
		}
	}
}

func TestGuardLeavesTheProxysNeighboursGuarded(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(s.Close)
	tr := &http.Transport{Proxy: func(r *http.Request) (*url.URL, error) {
		if r.URL.Hostname() == "images.invalid" {
			return url.Parse("http://127.0.0.1:1")
		}
		return nil, nil
	}}
	client := guarded(t, tr, nil)
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://images.invalid/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := client.Do(req); err == nil {
		resp.Body.Close()
		t.Fatal("a proxy that is not there answered")
	}
	resp, err := client.Get(s.URL)
	if err == nil {
		resp.Body.Close()
	}
	if !api.Is(err, api.Denied) {
		t.Fatalf("got %v, want that another port of the proxy's host is refused", err)
	}
}
