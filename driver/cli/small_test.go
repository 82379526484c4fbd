package cli

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func TestNameFrom(t *testing.T) {
	for in, want := range map[string]string{
		"https://a.example/x/Debian_12-Generic.qcow2.xz": "debian-12-generic",
		"/data/golden.img?token=1":                       "golden",
		"disk.RAW.gz":                                    "disk",
		"/data/windows.vmdk":                             "windows",
		"https://a.example/appliance.vhdx.zst":           "appliance",
		"...":                                            "",
	} {
		if got := nameFrom(in); got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{"10Gi": 10 << 30, "10GiB": 10 << 30, "1G": 1e9, "1g": 1e9, "512": 512, "1.5Mi": 3 << 19} {
		if got, err := parseSize(in); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "-1", "0", "ten", "10Qx"} {
		if got, err := parseSize(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
}

// TestProgressInPlainLines: without a terminal, each state and each tenth is a plain line, however often progress is
// reported.
func TestProgressInPlainLines(t *testing.T) {
	var b strings.Builder
	p := newProgress(&b, "image x")
	p.showProgress("starting", 0, 0)
	for i := int64(0); i <= 1000; i++ {
		p.showProgress("in-progress", i<<20, 1000<<20)
	}
	p.clearLine()
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != 12 || strings.ContainsAny(b.String(), "\r\x1b") || lines[11] != "image x: in-progress, 100 %, 1000 MiB of 1000 MiB" {
		t.Errorf("%d lines:\n%s", len(lines), b.String())
	}
}

// TestProgressOnATerminal: on a terminal the line is drawn again, never wider than the terminal.
func TestProgressOnATerminal(t *testing.T) {
	var b strings.Builder
	p := newProgress(&b, "image x")
	p.width = 60
	p.showProgress("in-progress", 5<<20, 10<<20)
	for _, frame := range strings.Split(b.String(), "\r")[1:] {
		if n := len(strings.TrimSuffix(frame, "\x1b[K")); n >= 60 {
			t.Errorf("%d columns: %q", n, frame)
		}
	}
	if !strings.Contains(b.String(), " 50 %  5 MiB of 10 MiB") {
		t.Errorf("%q", b.String())
	}
}

// TestProgressKeepsItsBar: a terminal of 80 columns shows a bar beside speed and time. After a pause, the speed counts
// the bytes since the pause.
func TestProgressKeepsItsBar(t *testing.T) {
	var b strings.Builder
	p := newProgress(&b, "image debian-12")
	p.width = 80
	ago := func(d time.Duration) { p.baseAt = time.Now().Add(-d) }
	frames := func() []string { return strings.Split(b.String(), "\r") }
	last := func() string { return strings.TrimSuffix(frames()[len(frames())-1], "\x1b[K") }
	p.showProgress("in-progress", 1<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.showProgress("in-progress", 501<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "[=") || !strings.Contains(line, " 50 %") || !strings.Contains(line, "10s left") {
		t.Errorf("%q", line)
	}
	ago(100 * time.Millisecond) // no figure but the count
	p.drawn = time.Time{}
	p.showProgress("in-progress", 502<<20, 1000<<20)
	if width := func(s string) int { return strings.Index(s, "]") - strings.Index(s, "[") }; len(frames()) < 2 ||
		width(last()) != width(frames()[len(frames())-2]) {
		t.Errorf("the bar flickers: %q", frames())
	}
	p.showProgress("waiting for the API server", 0, 0)
	p.showProgress("in-progress", 400<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.showProgress("in-progress", 500<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "50s left") {
		t.Errorf("%q: 100 MiB came in 10 s, 500 MiB are left", line)
	}
	p.width = 200
	p.showProgress("sending", 400<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.showProgress("sending", 500<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "10 MiB/s") && !strings.Contains(line, "9.9 MiB/s") {
		t.Errorf("%q", line)
	}
}

// TestErrorsOfAConnectionAreRetried: HTTP/2 has errors without a type, for example when the server closes the
// connection.
func TestErrorsOfAConnectionAreRetried(t *testing.T) {
	of := func(err error) error { return &url.Error{Op: "Get", URL: "https://localhost:1/apis", Err: err} }
	for what, err := range map[string]error{
		"closed":  of(errors.New("http2: client connection force closed via ClientConn.Close")),
		"end":     of(io.ErrUnexpectedEOF),
		"refused": of(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}),
		"starts":  apierrors.NewServiceUnavailable("not yet"),
	} {
		if got := explain(t.Context(), err); !isUnanswered(got) {
			t.Errorf("%s: %v ends the command", what, got)
		}
	}
	for what, err := range map[string]error{
		"refused":     apierrors.NewUnauthorized("no"),
		"certificate": of(&tls.CertificateVerificationError{Err: errors.New("unknown authority")}),
	} {
		if got := explain(t.Context(), err); isUnanswered(got) {
			t.Errorf("%s: the command waits after %v", what, got)
		}
	}
}
