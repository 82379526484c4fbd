package http

import (
	"bufio"
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// FuzzAccess: a Secret's content either cannot be sent, with a message which repeats no value, or arrives unchanged,
// with nothing else.
func FuzzAccess(f *testing.F) {
	for _, s := range [][4]string{{"me", "hunter2", "", ""}, {"", "", "token", "X-Key"}, {"a:b", "c", "", ""},
		{"me\r\nHost: x", "p", "", "Authorization"}, {"", "", "a\nb", "Content-Length"}, {"", "", "", "x y"}, {"", "p", "", ":"}} {
		f.Add(s[0], s[1], s[2], s[3], "value")
	}
	f.Add("", "", "", "X-Key", "one\r\nX-Other: two")
	f.Fuzz(func(t *testing.T, username, password, token, name, value string) {
		a := Access{Username: username, Password: password, Token: token, Header: http.Header{}}
		if name != "" {
			a.Header.Set(name, value)
		}
		if err := a.Check(); err != nil {
			if api.KindOf(err) != api.Invalid || len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\r\n\x00") {
				t.Fatalf("not a message: %q", err)
			}
			return
		}
		req := httptest.NewRequest(http.MethodGet, "http://images.example.com/x", nil)
		req.Header = http.Header{"Range": {"bytes=0-1"}}
		a.addCredentials(req)
		var wire bytes.Buffer
		if err := req.Write(&wire); err != nil {
			t.Fatal(err)
		}
		sent := wire.String()
		got, err := http.ReadRequest(bufio.NewReader(&wire))
		if err != nil {
			t.Fatalf("%v: %q", err, sent)
		}
		want := map[string]bool{"Range": true, "User-Agent": true}
		if token != "" || username != "" {
			want["Authorization"] = true
		}
		if name != "" {
			want[http.CanonicalHeaderKey(name)] = true
			if h := got.Header.Get(name); !want["Authorization"] && h != strings.Trim(value, " \t") {
				t.Fatalf("header %q is %q, not %q", name, h, value)
			}
		}
		for h, v := range got.Header {
			if !want[h] || len(v) != 1 {
				t.Fatalf("header %q is sent: %q", h, sent)
			}
		}
		if got.Host != "images.example.com" || got.Header.Get("Range") != "bytes=0-1" || wire.Len() > 0 {
			t.Fatalf("another request is sent: %q", sent)
		}
		if u, p, ok := got.BasicAuth(); token == "" && username != "" && (!ok || u != username || p != password) {
			t.Fatalf("%q and %q arrive", u, p)
		}
		if a.removeCredentials(got.Header); len(got.Header) > 2 {
			t.Fatalf("left for another server: %v", got.Header)
		}
	})
}

// FuzzAddress: no way to write an address connects to the inside, and no shown address has a password or a query.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{"127.0.0.1:80", "[::1]:80", "[::ffff:10.0.0.1]:443", "[64:ff9b::7f00:1]:80", "[2002:7f00:1::]:80",
		"[fe80::1%eth0]:80", "0.0.0.0:1", "169.254.169.254:80", "8.8.8.8:80", "[2606:4700::1]:443", "0177.0.0.1:80",
		"http://me:hunter2@images.example.com/a?X-Signature=hunter2#x", "https://[::1%25x]/?", "http://a b/", "//x", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if at, err := netip.ParseAddrPort(s); origin.Guard(nil)("tcp4", s, nil) == nil {
			if err != nil {
				t.Fatalf("%q can be connected to: %v", s, err)
			}
			ip := net.IP(at.Addr().AsSlice()) // another reading of the same bytes
			if ip.IsLoopback() || ip.IsPrivate() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip.IsUnspecified() ||
				ip.IsInterfaceLocalMulticast() || !ip.IsGlobalUnicast() {
				t.Fatalf("%q can be connected to", s)
			}
		}
		u, err := url.Parse(s)
		if err != nil || checkScheme(u) != nil {
			return
		}
		again, err := url.Parse(redactURL(u))
		if err != nil {
			return // an invalid port is shown as far as possible
		}
		if again.User != nil || again.Fragment != "" || again.RawQuery != "" && again.RawQuery != "..." ||
			again.Host != u.Host || again.Path != u.Path {
			t.Fatalf("%q is shown as %q, %v", s, redactURL(u), err)
		}
	})
}
