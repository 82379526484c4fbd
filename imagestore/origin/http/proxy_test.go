package http

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestProxyOfTheEnvironment: the environment names the proxy. A process reads the environment once, so each download
// here has a process of its own.
func TestProxyOfTheEnvironment(t *testing.T) {
	const variable = "DROVER_TEST_DOWNLOAD"
	if url := os.Getenv(variable); url != "" {
		o := quick
		o.Allow = nil // the proxy may be on a loopback address all the same
		b, _, err := fetch(t, url, o)
		if err != nil || string(b) != "through the proxy" {
			t.Fatalf("got %q: %v", b, err)
		}
		return
	}
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, r.Method+" "+r.Host)
		mu.Unlock()
		if r.Method == http.MethodConnect {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_, _ = io.WriteString(w, "through the proxy")
	}))
	t.Cleanup(proxy.Close)
	for _, c := range []struct {
		name, url, except string
		ok                bool
		asked             []string
	}{
		{"http", "http://images.invalid/x", "", true, []string{"GET images.invalid"}},
		{"https", "https://images.invalid/x", "", false, []string{"CONNECT images.invalid:443"}},
		{"excepted", "http://images.invalid/x", "images.invalid", false, nil},
		{"an address inside", "http://169.254.169.254/x", "", false, nil},
	} {
		asked = nil
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProxyOfTheEnvironment$")
		cmd.Env = append(os.Environ(), variable+"="+c.url, "HTTP_PROXY="+proxy.URL, "HTTPS_PROXY="+proxy.URL,
			"NO_PROXY="+c.except, "no_proxy=")
		said, err := cmd.CombinedOutput()
		mu.Lock()
		if (err == nil) != c.ok || !slices.Equal(asked, c.asked) || !c.ok && !strings.Contains(string(said), "got \"\"") {
			t.Errorf("%s: the proxy was asked for %q: %v: %s", c.name, asked, err, said)
		}
		mu.Unlock()
	}
}
