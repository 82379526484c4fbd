package azure

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
	"drover.io/drover/block/suite"
)

// account and key are those of Azurite's documentation.
const (
	account = "devstoreaccount1"
	key     = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newStore(t *testing.T, cfg Config) *Store {
	t.Helper()
	if cfg.Key == "" {
		cfg.Key = key
	}
	cfg.Account, cfg.Container = account, "backups"
	s, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// startAzurite starts Azurite, installs it before with npm if the machine has none, and returns the endpoint.
func startAzurite(t *testing.T) string {
	t.Helper()
	program, err := exec.LookPath("azurite-blob")
	if err != nil {
		dir := t.TempDir()
		out, err := exec.CommandContext(t.Context(), "npm", "install", "--no-audit", "--no-fund", "--prefix", dir,
			"azurite@3.37.0").CombinedOutput()
		if err != nil {
			t.Fatalf("npm: %v: %s", err, out)
		}
		program = filepath.Join(dir, "node_modules/.bin/azurite-blob")
	}
	port := targettest.FreePort(t)
	targettest.StartServer(t, port, program, "--silent", "--skipApiVersionCheck", "--inMemoryPersistence",
		"--disableTelemetry", "--blobHost", "127.0.0.1", "--blobPort", strconv.Itoa(port))
	return fmt.Sprintf("http://127.0.0.1:%d/%s", port, account)
}

// TestAzureKeepsTheContract: an Azure store passes the contract of stores, with a prefix in a container with other
// objects.
func TestAzureKeepsTheContract(t *testing.T) {
	suite.Slow(t)
	testContract(t, startServer(t))
}

// TestAzureKeepsTheContractWithAzurite: the same with the emulator of Microsoft.
func TestAzureKeepsTheContractWithAzurite(t *testing.T) {
	suite.Long(t) // installs Azurite
	testContract(t, startAzurite(t))
}

func testContract(t *testing.T, endpoint string) {
	n := 0
	targettest.Run(t, func(t *testing.T) target.Store {
		n++
		other := newStore(t, Config{Endpoint: endpoint})
		if n == 1 {
			if err := other.Put(t.Context(), "config", nil); !api.Is(err, api.Unavailable) ||
				!strings.Contains(err.Error(), "ContainerNotFound") {
				t.Errorf("put without a container: %v", err)
			}
			_, err := other.client.Create(t.Context(), nil)
			must(t, err)
		}
		must(t, other.Put(t.Context(), fmt.Sprintf("drover%d2/data/a", n), []byte("other")))
		must(t, other.Put(t.Context(), "config", []byte("other")))
		wrong := newStore(t, Config{Endpoint: endpoint, Key: web.Secret(base64.StdEncoding.EncodeToString([]byte("hush")))})
		if err := wrong.Put(t.Context(), "config", nil); !api.Is(err, api.Denied) || strings.Contains(err.Error(), "hush") {
			t.Errorf("put with a wrong key: %v", err)
		}
		return newStore(t, Config{Endpoint: endpoint, Prefix: fmt.Sprintf("drover%d", n)})
	})
}

// serve starts a server with a handler, and a store with short retries.
func serve(t *testing.T, h http.HandlerFunc) *Store {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return newStore(t, Config{Endpoint: server.URL, Prefix: "p"})
}

func answerError(w http.ResponseWriter, status int, code string) {
	w.Header().Set("x-ms-error-code", code)
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>you said %s</Message></Error>", code, key)
}

// TestAnswersHaveAKind: the code of an answer decides on the kind of the error, which names the object and the code,
// and repeats no secret.
func TestAnswersHaveAKind(t *testing.T) {
	for code, c := range map[string]struct {
		status int
		kind   api.Kind
	}{
		"BlobNotFound": {404, api.NotFound}, "ContainerNotFound": {404, api.Unavailable},
		"AuthenticationFailed": {403, api.Denied},
		"AuthorizationFailure": {403, api.Denied}, "BlobArchived": {409, api.Unsupported}, "Md5Mismatch": {400, api.Corrupt},
		"BlobImmutableDueToPolicy": {409, api.Denied}, "Strange": {400, api.Other}, "": {401, api.Denied},
	} {
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) { answerError(w, c.status, code) })
		err := s.Put(t.Context(), "data/a", []byte("a"))
		if !api.Is(err, c.kind) || !strings.Contains(err.Error(), code) || strings.Contains(err.Error(), key) ||
			!strings.HasPrefix(err.Error(), "Azure store backups/p: cannot write object data/a: ") {
			t.Errorf("%s: %v of kind %v", code, err, api.KindOf(err))
		}
	}
}

// TestWrongAnswersAreRefused: a body of another length or range than wanted is an error, never other bytes.
func TestWrongAnswersAreRefused(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"whole object in place of a range": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 100))
		},
		"other range": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 0-9/100")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, 10))
		},
		"body too short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 10-19/100")
			w.Header().Set("Content-Length", "10")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, 5))
		},
		"refusal of a range inside of the object": func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				answerError(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
			} else {
				w.Header().Set("Content-Length", "100")
			}
		},
	} {
		if got, err := serve(t, h).Get(t.Context(), "data/a", 10, 10); !api.Is(err, api.Unavailable) {
			t.Errorf("%s: %d bytes, %v of kind %v", name, len(got), err, api.KindOf(err))
		}
	}
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(int64(1<<30)+1))
	})
	if got, err := s.Get(t.Context(), "data/a", 0, -1); !api.Is(err, api.Unavailable) {
		t.Errorf("an object that is too long: %d bytes, %v", len(got), err)
	}
}

// TestServerThatDoesNotAnswerIsUnavailable: an operation ends at its deadline, and with the caller's context.
func TestServerThatDoesNotAnswerIsUnavailable(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer server.Close()
	s := newStore(t, Config{Endpoint: server.URL, Network: web.Network{AnswerTime: 20 * time.Millisecond}})
	if _, err := s.Stat(t.Context(), "a"); !api.Is(err, api.Unavailable) {
		t.Errorf("stat: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.List(ctx, "", func(target.Object) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Errorf("list with an ended context: %v", err)
	}
}

// TestListSkipsForeignNames: a list has no object of another prefix or with a bad name, whatever the server sends, and
// ends with the deadline if the server sends empty pages for ever.
func TestListSkipsForeignNames(t *testing.T) {
	page := func(w http.ResponseWriter, marker string, names ...string) {
		w.Header().Set("Content-Type", "application/xml")
		fmt.Fprint(w, `<?xml version="1.0"?><EnumerationResults><Blobs>`)
		for _, name := range names {
			fmt.Fprintf(w, "<Blob><Name>%s</Name><Properties><Content-Length>3</Content-Length></Properties></Blob>", name)
		}
		fmt.Fprintf(w, "</Blobs><NextMarker>%s</NextMarker></EnumerationResults>", marker)
	}
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("marker") == "" {
			page(w, "next", "p/data/a", "p/index/a", "q/data/a", "p/data/../a", "p/data//a", "p/data/.a", "p/", "")
		} else {
			page(w, "", "p/data/b")
		}
	})
	got := targettest.List(t, s, "data/")
	if len(got) != 2 || got["data/a"].Size != 3 || got["data/b"].Size != 3 {
		t.Errorf("the list has %v", got)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { page(w, "next") }))
	defer server.Close()
	s = newStore(t, Config{Endpoint: server.URL, Network: web.Network{AnswerTime: 50 * time.Millisecond}})
	if err := s.List(t.Context(), "", func(target.Object) error { return nil }); !api.Is(err, api.Unavailable) {
		t.Errorf("a list without an end: %v", err)
	}
}

// TestBadSettingsAreRefused: New refuses settings that cannot work, with kind invalid, and shows no secret.
func TestBadSettingsAreRefused(t *testing.T) {
	good := Config{Endpoint: "https://a.blob.core.windows.net", Account: "a", Key: "aHVzaA==", Container: "backups"}
	for name, change := range map[string]func(c *Config){
		"no account":       func(c *Config) { c.Account = "" },
		"no key":           func(c *Config) { c.Key = "" },
		"key not base64":   func(c *Config) { c.Key = "hush!" },
		"user in URL":      func(c *Config) { c.Endpoint = "https://u:hush@a.example" },
		"token in URL":     func(c *Config) { c.Endpoint = "https://a.example?sig=hush" },
		"no URL":           func(c *Config) { c.Endpoint = "a.example" },
		"prefix leads out": func(c *Config) { c.Prefix = "a/../b" },
		"no certificate":   func(c *Config) { c.CA = []byte("-----BEGIN nothing") },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); !api.Is(err, api.Invalid) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if _, err := New(good); err != nil || strings.Contains(fmt.Sprintf("%v %+v %#v", good, good, good), "aHVz") {
		t.Errorf("good settings: %v, or a format shows the key", err)
	}
}
