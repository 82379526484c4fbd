package cli

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"drover.io/drover/driver/cli/origin"
	"drover.io/drover/driver/cli/restarts"
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
		if got := origin.NameFrom(in); got != want {
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
		if got := explain(t.Context(), err); !restarts.IsUnanswered(got) {
			t.Errorf("%s: %v ends the command", what, got)
		}
	}
	for what, err := range map[string]error{
		"refused":     apierrors.NewUnauthorized("no"),
		"certificate": of(&tls.CertificateVerificationError{Err: errors.New("unknown authority")}),
	} {
		if got := explain(t.Context(), err); restarts.IsUnanswered(got) {
			t.Errorf("%s: the command waits after %v", what, got)
		}
	}
}
