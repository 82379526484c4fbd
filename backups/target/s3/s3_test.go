package s3

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
	"drover.io/drover/block/suite"
)

const bucket = "backups"

// serve starts a server with an empty bucket; with wraps its handler.
func serve(t *testing.T, with func(http.Handler) http.Handler, options ...gofakes3.Option) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(with(newHandler(t, options...)))
	t.Cleanup(server.Close)
	return server
}

func newHandler(t *testing.T, options ...gofakes3.Option) http.Handler {
	t.Helper()
	backend := s3mem.New()
	must(t, backend.CreateBucket(bucket))
	return gofakes3.New(backend, options...).Server()
}

func unchanged(h http.Handler) http.Handler { return h }

func newStore(t *testing.T, cfg Config) *Store {
	t.Helper()
	if cfg.Bucket == "" {
		cfg.Bucket = bucket
	}
	if cfg.AccessKey == "" {
		cfg.AccessKey, cfg.SecretKey = "key", "hush-hush"
	}
	s, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestS3KeepsTheContract: an S3 store passes the contract of stores, with a prefix in a bucket with other objects.
func TestS3KeepsTheContract(t *testing.T) {
	suite.Slow(t)
	targettest.Run(t, func(t *testing.T) target.Store {
		server := serve(t, unchanged)
		other := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
		must(t, other.Put(t.Context(), "drover2/data/a", []byte("other")))
		must(t, other.Put(t.Context(), "config", []byte("other")))
		return newStore(t, Config{Endpoint: server.URL, Region: "us-east-1", Prefix: "drover"})
	})
}

// TestS3KeepsTheContractWithVersity: the same with another server, which has files behind it.
func TestS3KeepsTheContractWithVersity(t *testing.T) {
	suite.Long(t) // builds the server
	v := targettest.StartVersity(t)
	n := 0
	targettest.Run(t, func(t *testing.T) target.Store {
		n++
		cfg := Config{Endpoint: v.Endpoint, Region: v.Region, AccessKey: web.Secret(v.AccessKey),
			SecretKey: web.Secret(v.SecretKey)}
		other := newStore(t, cfg)
		must(t, other.Put(t.Context(), fmt.Sprintf("drover%d2/data/a", n), []byte("other")))
		wrong := cfg
		wrong.SecretKey = "other"
		if err := newStore(t, wrong).Put(t.Context(), "config", nil); !api.Is(err, api.Denied) {
			t.Errorf("put with a wrong key: %v", err)
		}
		cfg.Prefix = fmt.Sprintf("drover%d", n)
		return newStore(t, cfg)
	})
}
