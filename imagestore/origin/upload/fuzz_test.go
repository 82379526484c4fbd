package upload

import (
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// FuzzUpload: a sender's request is refused with a message, or is a part of the wanted image.
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
		r := &http.Request{Method: method, URL: &url.URL{Path: Path, RawQuery: query}, ContentLength: n,
			Header: http.Header{"Content-Range": {contentRange}, "Content-Type": {contentType}},
			Body:   io.NopCloser(strings.NewReader(body))}
		p, err := up.parseRequest(r)
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
