package source

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

// What a server or a sender says of a range is a range, or is nothing.
func FuzzContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-9/10", "bytes 5-9/*", "bytes 0-9/9", "bytes 9-0/10", "bytes */10", "bytes -5-9/10",
		"bytes +5-9/10", "bytes 0-5/-7", "bytes 0-9223372036854775807/*", "bytes 0-99999999999999999999/10", "items 0-1/2", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		from, to, total, ok := parseContentRange(s)
		if !ok {
			return
		}
		if from < 0 || to < from || to+1 < 0 || total != -1 && total <= to {
			t.Fatalf("%q is %d to %d of %d", s, from, to, total)
		}
		again := fmt.Sprintf("bytes %d-%d/%d", from, to, total)
		if total < 0 {
			again = fmt.Sprintf("bytes %d-%d/*", from, to)
		}
		if f, l, n, ok := parseContentRange(again); !ok || f != from || l != to || n != total {
			t.Fatalf("%q is %q, which is %d to %d of %d", s, again, f, l, n)
		}
	})
}

func FuzzRetryAfter(f *testing.F) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, s := range []string{"0", "120", "-1", "99999999999999999999", "Fri, 02 Jan 2026 03:04:10 GMT",
		"Fri, 02 Jan 1970 03:04:10 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "soon", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if wait, told := retryAfter(s, now); wait < 0 || !told && wait != 0 {
			t.Fatalf("%q is %s, told %v", s, wait, told)
		}
	})
}

// FuzzAccess: what a Secret holds either cannot be sent, and the message repeats no value, or it arrives as it is, and as
// nothing else.
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
		a.apply(req)
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
		if a.strip(got.Header); len(got.Header) > 2 {
			t.Fatalf("left for another server: %v", got.Header)
		}
	})
}

// FuzzAddress: no way to write an address connects to the inside, and no address that is shown has a password or a query.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{"127.0.0.1:80", "[::1]:80", "[::ffff:10.0.0.1]:443", "[64:ff9b::7f00:1]:80", "[2002:7f00:1::]:80",
		"[fe80::1%eth0]:80", "0.0.0.0:1", "169.254.169.254:80", "8.8.8.8:80", "[2606:4700::1]:443", "0177.0.0.1:80",
		"http://me:hunter2@images.example.com/a?X-Signature=hunter2#x", "https://[::1%25x]/?", "http://a b/", "//x", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if at, err := netip.ParseAddrPort(s); Guard(nil)("tcp4", s, nil) == nil {
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
		again, err := url.Parse(redact(u))
		if err != nil {
			return // a port that is none is shown as it can be
		}
		if again.User != nil || again.Fragment != "" || again.RawQuery != "" && again.RawQuery != "..." ||
			again.Host != u.Host || again.Path != u.Path {
			t.Fatalf("%q is shown as %q, %v", s, redact(u), err)
		}
	})
}

// FuzzUpload: whatever a sender announces, it is refused with a message, or is a part of the image that was asked for.
func FuzzUpload(f *testing.F) {
	form := "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\nno\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"chunk\"; filename=\"../a\"\r\n\r\nhello\r\n--b--\r\n"
	for _, c := range []struct {
		method, query, contentRange, contentType string
		n                                        int64
	}{{"PUT", "", "", "", 5}, {"PUT", "size=5", "", "", -1}, {"POST", "size=5", "", "multipart/form-data; boundary=b", -1},
		{"PUT", "size=5&size=6", "bytes 1-4/5", "", 4}, {"PUT", "", "bytes 0-4/*", "", 5}, {"PATCH", "", "", "", 5},
		{"PUT", "size=-1", "", "", 5}, {"PUT", "size=99999999999999999999", "", "", 5}, {"PUT", "", "bytes 0-9/7", "", -1},
		{"POST", "size=5", "bytes 0-4/5", "multipart/form-data; boundary=b", 5}, {"POST", "size=5", "", "multipart/form-data", 5}} {
		for _, size := range []int64{0, 5} {
			f.Add(c.method, c.query, c.contentRange, c.contentType, c.n, size, form)
			f.Add(c.method, c.query, c.contentRange, c.contentType, c.n, size, "--b\r\n"+strings.Repeat("no header ", 200)+"\r\n")
		}
	}
	f.Fuzz(func(t *testing.T, method, query, contentRange, contentType string, n, size int64, body string) {
		if n < -1 || size < 0 {
			return // the server does not say so
		}
		up := &Upload{size: size}
		r := &http.Request{Method: method, URL: &url.URL{Path: UploadPath, RawQuery: query}, ContentLength: n,
			Header: http.Header{"Content-Range": {contentRange}, "Content-Type": {contentType}},
			Body:   io.NopCloser(strings.NewReader(body))}
		p, err := up.read(r)
		if err != nil {
			if api.KindOf(err) == api.Other || len(err.Error()) > 1000 {
				t.Fatalf("not a message: %v", err)
			}
			return
		}
		if p.size <= 0 || size != 0 && p.size != size || p.from < 0 || p.to > p.size || p.to != -1 && p.to < p.from ||
			p.explicit != (contentRange != "") || p.body == nil {
			t.Fatalf("this is a part of %d bytes: %+v", size, p)
		}
		got, _ := io.ReadAll(p.body)
		if len(got) > len(body) || !strings.Contains(body, string(got)) {
			t.Fatalf("%q was sent, %q is read", body, got)
		}
	})
}
