package s3

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/minio/minio-go/v7"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
)

// The pauses of the library between tries.
func init() { minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, time.Millisecond }

// operations runs each operation of a store on the object name.
func operations(ctx context.Context, s *Store, name string) map[string]error {
	_, get := s.Get(ctx, name, 0, -1)
	_, part := s.Get(ctx, name, 0, 1)
	_, stat := s.Stat(ctx, name)
	return map[string]error{
		"get": get, "get of a range": part, "stat": stat,
		"put":    s.Put(ctx, name, []byte("a")),
		"list":   s.List(ctx, "", func(target.Object) error { return nil }),
		"delete": s.Delete(ctx, name),
	}
}

func mustAllBe(t *testing.T, kind api.Kind, text string, errs map[string]error) {
	t.Helper()
	for operation, err := range errs {
		if !api.Is(err, kind) || !strings.HasPrefix(err.Error(), "S3 store backups: cannot ") ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v of kind %v, want kind %v and %q", operation, err, api.KindOf(err), kind, text)
		}
	}
}

func answerError(w http.ResponseWriter, status int, code, message string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, message)
}

// TestBusyServerIsAskedAgain: an operation survives two answers of a busy server; after maxTries such answers the
// operation is unavailable.
func TestBusyServerIsAskedAgain(t *testing.T) {
	var busy, requests atomic.Int32
	server := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			if busy.Add(-1) >= 0 {
				answerError(w, http.StatusServiceUnavailable, "SlowDown", "too many requests")
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
	body := targettest.Body(1<<20, 1)
	busy.Store(2)
	must(t, s.Put(t.Context(), "a", body))
	busy.Store(2)
	if got, err := s.Get(t.Context(), "a", 0, -1); err != nil || !bytes.Equal(got, body) || requests.Load() != 6 {
		t.Errorf("get: %d bytes, %v, after %d requests", len(got), err, requests.Load())
	}
	requests.Store(0)
	busy.Store(1 << 30)
	errs := operations(t.Context(), s, "a")
	delete(errs, "stat") // the answer to HEAD has no body
	mustAllBe(t, api.Unavailable, "too many requests (SlowDown)", errs)
	if n := requests.Load(); n != 6*maxTries {
		t.Errorf("six operations made %d requests, want %d", n, 6*maxTries)
	}
}

// TestSilentServerIsUnavailable: a server that does not answer, or stops in the middle of an answer, costs the deadline
// of an operation.
func TestSilentServerIsUnavailable(t *testing.T) {
	silent := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	server := httptest.NewServer(http.HandlerFunc(silent))
	defer server.Close()
	cfg := Config{Endpoint: server.URL, Region: "us-east-1", Network: web.Network{AnswerTime: 20 * time.Millisecond}}
	mustAllBe(t, api.Unavailable, "", operations(t.Context(), newStore(t, cfg), "a"))
	halfway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		_, _ = w.Write([]byte("half"))
		w.(http.Flusher).Flush()
		silent(w, r)
	}))
	defer halfway.Close()
	cfg.Endpoint = halfway.URL
	s := newStore(t, cfg)
	_, get := s.Get(t.Context(), "a", 0, -1)
	list := s.List(t.Context(), "", func(target.Object) error { return nil })
	mustAllBe(t, api.Unavailable, "did not answer in time", map[string]error{
		"get": get, "list": list, "delete": s.Delete(t.Context(), "a"),
	})
}

// TestWrongAnswersAreRefused: Get refuses an answer that is cut, or that has no range or another range than the wanted
// one, and never returns other bytes.
func TestWrongAnswersAreRefused(t *testing.T) {
	var contentRange atomic.Value
	var length, status atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		w.Header().Set("Content-Length", fmt.Sprint(length.Load()))
		if r := contentRange.Load().(string); r != "" {
			w.Header().Set("Content-Range", r)
		}
		w.WriteHeader(int(status.Load()))
		_, _ = w.Write(make([]byte, 10))
	}))
	defer server.Close()
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
	for _, c := range []struct {
		contentRange   string
		status, length int64
		off, n         int64
		kind           api.Kind
		text           string
	}{
		{"", 200, 20, 0, -1, api.Unavailable, "ended after 10 of 20 bytes"},
		{"bytes 5-24/100", 206, 20, 5, 20, api.Unavailable, "ended after 10 of 20 bytes"},
		{"", 200, 10, 5, 10, api.Unavailable, `with the range ""`},
		{"bytes 6-15/100", 206, 10, 5, 10, api.Unavailable, "with the range"},
		{"bytes 5-14/100", 206, 10, 5, 20, api.Unavailable, "with the range"},
		{"bytes 5-14/100", 206, 10, 5, 5, api.Unavailable, "with the range"},
		{"bytes 5-14/100", 206, 10, 5, -1, api.Unavailable, "with the range"},
		{"bytes 5-14/*", 206, 10, 5, 10, api.Unavailable, "with the range"},
		{"bytes 5-14/15", 206, 10, 5, 20, api.Invalid, "too short"},
		{"", 200, 1 << 40, 0, -1, api.Unavailable, "length"},
	} {
		contentRange.Store(c.contentRange)
		status.Store(c.status)
		length.Store(c.length)
		got, err := s.Get(t.Context(), "a", c.off, c.n)
		if !api.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %d bytes, %v of kind %v", c, len(got), err, api.KindOf(err))
		}
	}
}

// TestCutListIsAnError: a list whose second page fails or whose answer is cut is an error, not a shorter list.
func TestCutListIsAnError(t *testing.T) {
	var cut atomic.Bool
	server := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Query().Get("list-type") == "":
				h.ServeHTTP(w, r)
			case cut.Load():
				answer := httptest.NewRecorder()
				h.ServeHTTP(answer, r)
				_, _ = w.Write(answer.Body.Bytes()[:answer.Body.Len()/2])
			case r.URL.Query().Get("continuation-token") != "":
				answerError(w, http.StatusForbidden, "AccessDenied", "no")
			default:
				q := r.URL.Query()
				q.Set("max-keys", "2")
				r.URL.RawQuery = q.Encode()
				h.ServeHTTP(w, r)
			}
		})
	})
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
	for i := range 3 {
		must(t, s.Put(t.Context(), fmt.Sprint("a", i), nil))
	}
	err := s.List(t.Context(), "", func(target.Object) error { return nil })
	mustAllBe(t, api.Denied, "", map[string]error{"second page": err})
	cut.Store(true)
	err = s.List(t.Context(), "", func(target.Object) error { return nil })
	mustAllBe(t, api.Unavailable, "", map[string]error{"cut": err})
}

// TestAnswersHaveAKind: an answer of the server has the kind of its code or status, in each operation.
func TestAnswersHaveAKind(t *testing.T) {
	for _, c := range []struct {
		status int
		code   string
		kind   api.Kind
	}{
		{403, "AccessDenied", api.Denied}, {403, "InvalidAccessKeyId", api.Denied}, {401, "Unauthorized", api.Denied},
		{403, "InvalidObjectState", api.Unsupported}, {404, "NoSuchBucket", api.Unavailable},
		{507, "XMinioStorageFull", api.Full}, {403, "QuotaExceeded", api.Full}, {400, "BadDigest", api.Corrupt},
		{429, "Busy", api.Unavailable}, {502, "Gateway", api.Unavailable}, {400, "MalformedXML", api.Other},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Minio-Error-Code", c.code) // for HEAD
			answerError(w, c.status, c.code, "because")
		}))
		errs := operations(t.Context(), newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"}), "a")
		mustAllBe(t, c.kind, c.code, errs)
		server.Close()
	}
}

// TestMissingBucketIsNotAnEmptyStore: without its bucket a store is unavailable in each operation.
func TestMissingBucketIsNotAnEmptyStore(t *testing.T) {
	s := newStore(t, Config{Endpoint: serve(t, unchanged).URL, Region: "us-east-1", Bucket: "backups-2"})
	for operation, err := range operations(t.Context(), s, "a") {
		if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "; make the bucket") {
			t.Errorf("%s: %v of kind %v", operation, err, api.KindOf(err))
		}
	}
}

// TestDeleteNamesTheObjectThatFailed: an object that the server keeps is an error with the name of the object and the
// kind of the cause; the server deletes the others of the batch and the later batches.
func TestDeleteNamesTheObjectThatFailed(t *testing.T) {
	server := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPost {
				h.ServeHTTP(w, r)
				return
			}
			request, _ := io.ReadAll(r.Body)
			kept := bytes.Contains(request, []byte("<Key>p/kept</Key>"))
			request = bytes.ReplaceAll(request, []byte("<Key>p/kept</Key>"), []byte("<Key>p/none</Key>"))
			r.Body = io.NopCloser(bytes.NewReader(request))
			sum := md5.Sum(request)
			r.Header.Set("Content-Md5", base64.StdEncoding.EncodeToString(sum[:]))
			answer := httptest.NewRecorder()
			h.ServeHTTP(answer, r)
			text := answer.Body.String()
			if kept {
				text = strings.Replace(text, "</DeleteResult>", "<Error><Key>p/kept</Key><Code>AccessDenied</Code>"+
					"<Message>locked</Message></Error><Error><Key>p/gone</Key><Code>NoSuchKey</Code></Error></DeleteResult>", 1)
			}
			_, _ = io.WriteString(w, text)
		})
	})
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1", Prefix: "p"})
	names := []string{"kept"}
	for i := range 1_100 {
		names = append(names, fmt.Sprint("a", i))
	}
	for _, name := range names[:5] {
		must(t, s.Put(t.Context(), name, nil))
	}
	must(t, s.Put(t.Context(), names[1100], nil))
	err := s.Delete(t.Context(), names...)
	want := "S3 store backups/p: cannot delete object kept: locked (AccessDenied); check the policy of the access key"
	if !api.Is(err, api.Denied) || err.Error() != want {
		t.Errorf("delete: %v of kind %v, want %s", err, api.KindOf(err), want)
	}
	if got := targettest.List(t, s, ""); len(got) != 1 {
		t.Errorf("the list has %v, want the kept object alone", got)
	}
}

// TestListsOfAHostileServerAreBounded: sizes that no object has, and times that no object of the API server can have,
// are moved into their bounds.
func TestListsOfAHostileServerAreBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		const object = "<Contents><Key>%s</Key><Size>%s</Size><LastModified>%s</LastModified></Contents>"
		fmt.Fprintf(w, "<ListBucketResult>"+object+object+"</ListBucketResult>",
			"a", "-5", "9999-12-31T23:59:59-23:00", "b", "9223372036854775807", "0000-01-01T00:00:00+23:00")
	}))
	defer server.Close()
	n := 0
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
	must(t, s.List(t.Context(), "", func(o target.Object) error {
		n++
		if o != target.NewObject(o.Name, o.Size, o.Modified) {
			t.Errorf("%+v", o)
		}
		return nil
	}))
	if n != 2 {
		t.Errorf("%d objects, want 2", n)
	}
}

// TestPutIsOnePlainRequest: an object of 33 MiB is one PUT with Content-MD5 and Content-Length, without parts, chunks
// and trailers, and a put of no bytes is, too.
func TestPutIsOnePlainRequest(t *testing.T) {
	var requests []string
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		hash := md5.New()
		n, err := io.Copy(hash, r.Body)
		requests = append(requests, fmt.Sprint(r.Method, r.URL, r.TransferEncoding, len(r.Trailer),
			r.Header.Get("Content-Encoding"), r.Header.Get("X-Amz-Content-Sha256"), n == r.ContentLength, err,
			r.Header.Get("Content-Md5") == base64.StdEncoding.EncodeToString(hash.Sum(nil))))
	}))
	defer server.Close()
	s := newStore(t, Config{Endpoint: server.URL, Region: "us-east-1"})
	for _, n := range []int{33 << 20, 0} {
		requests = nil
		must(t, s.Put(t.Context(), "data/a", targettest.Body(n, 1)))
		if want := "PUT/backups/data/a[]0UNSIGNED-PAYLOADtrue <nil>true"; len(requests) != 1 ||
			strings.ReplaceAll(requests[0], " ", "") != strings.ReplaceAll(want, " ", "") {
			t.Errorf("%d bytes: %q, want %q", n, requests, want)
		}
	}
}

// lateTransport answers before it has read the body of the request.
type lateTransport struct {
	answer *http.Response
	err    error
	read   atomic.Bool
}

func (l *lateTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	go func() {
		time.Sleep(time.Hour)
		_, _ = io.Copy(io.Discard, req.Body)
		l.read.Store(true)
		_ = req.Body.Close()
	}()
	return l.answer, l.err
}

// TestRequestEndsAfterItsBodyIsReleased: a failed request returns, and the close of an early answer returns, only after
// the transport has read the body for the last time. A next try or the caller of Put may change the body then.
func TestRequestEndsAfterItsBodyIsReleased(t *testing.T) {
	for name, early := range map[string]*lateTransport{
		"error":  {err: errors.New("reset")},
		"answer": {answer: &http.Response{Body: http.NoBody}},
	} {
		synctest.Test(t, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://s3.example", strings.NewReader("body"))
			must(t, err)
			answer, err := web.RoundTripper{Next: early}.RoundTrip(req)
			if !errors.Is(err, early.err) {
				t.Errorf("%s: %v", name, err)
			}
			if answer != nil {
				must(t, answer.Body.Close())
			}
			if !early.read.Load() {
				t.Errorf("%s: the request ended before the transport released the body", name)
			}
		})
	}
}

// TestVirtualHostedThroughAProxy: with VirtualHosted the host has the bucket, and requests take the proxy of the
// settings; the store works in both styles, and learns the region from the server.
func TestVirtualHostedThroughAProxy(t *testing.T) {
	var hosts []string
	server := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut {
				hosts = append(hosts, r.Host+r.URL.Path)
			}
			h.ServeHTTP(w, r)
		})
	}, gofakes3.WithHostBucketBase("s3.example"))
	for _, a := range []Addressing{VirtualHosted, Path, Auto} {
		s := newStore(t, Config{Endpoint: "http://s3.example", Addressing: a,
			Network: web.Network{HTTPProxy: web.Secret(server.URL)}})
		must(t, s.Put(t.Context(), "data/a", []byte("a")))
		if got, err := s.Get(t.Context(), "data/a", 0, -1); err != nil || string(got) != "a" {
			t.Errorf("%v: %q, %v", a, got, err)
		}
		if got := targettest.List(t, s, "data/"); len(got) != 1 {
			t.Errorf("%v: the list has %v", a, got)
		}
		must(t, s.Delete(t.Context(), "data/a"))
	}
	want := "[backups.s3.example/data/a s3.example/backups/data/a s3.example/backups/data/a]"
	if fmt.Sprint(hosts) != want {
		t.Errorf("requests to %v, want %s", hosts, want)
	}
}

// TestOwnAuthority: the store refuses a server with a certificate of an own authority, unless CA has the authority.
func TestOwnAuthority(t *testing.T) {
	server := httptest.NewUnstartedServer(newHandler(t))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	defer server.Close()
	cfg := Config{Endpoint: server.URL, Region: "us-east-1"}
	mustAllBe(t, api.Unavailable, "certificate", operations(t.Context(), newStore(t, cfg), "a"))
	cfg.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	s := newStore(t, cfg)
	must(t, s.Put(t.Context(), "a", []byte("a")))
	if got, err := s.Get(t.Context(), "a", 0, -1); err != nil || string(got) != "a" {
		t.Errorf("get: %q, %v", got, err)
	}
}

// TestBadSettingsAreRefused: New refuses settings that cannot work, with kind invalid, and shows no secret.
func TestBadSettingsAreRefused(t *testing.T) {
	good := Config{Endpoint: "https://s3.example:9000", Bucket: bucket, AccessKey: "key", SecretKey: "hush-hush"}
	for name, change := range map[string]func(c *Config){
		"no access key":     func(c *Config) { c.AccessKey = "" },
		"no secret key":     func(c *Config) { c.SecretKey = "" },
		"user in URL":       func(c *Config) { c.Endpoint = "https://u:hush-hush@s3.example" },
		"path in URL":       func(c *Config) { c.Endpoint = "https://s3.example/x" },
		"no URL":            func(c *Config) { c.Endpoint = "s3.example:9000" },
		"other scheme":      func(c *Config) { c.Endpoint = "ftp://s3.example" },
		"prefix leads out":  func(c *Config) { c.Prefix = "a/../b" },
		"no certificate":    func(c *Config) { c.CA = []byte("-----BEGIN nothing") },
		"control character": func(c *Config) { c.Endpoint = "https://s3.example\x7f" },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); !api.Is(err, api.Invalid) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if _, err := New(good); err != nil {
		t.Errorf("good settings: %v", err)
	}
}

// TestNoSecretIsShown: no error shows a secret that the server repeats, and neither formats, JSON nor logs show the
// secrets of the settings.
func TestNoSecretIsShown(t *testing.T) {
	cfg := Config{Region: "us-east-1", Bucket: bucket, AccessKey: "key", SecretKey: "hush-key", SessionToken: "hush-token",
		Network: web.Network{HTTPSProxy: "http://user:hush-proxy@127.0.0.1:1",
			HTTPProxy: "http://user:hush%2fproxy@127.0.0.1:1", NoProxy: "127.0.0.1"}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answerError(w, 403, "AccessDenied", "you said hush-key and hush-token and hush-proxy and hush/proxy")
	}))
	defer server.Close()
	cfg.Endpoint = server.URL
	var shown strings.Builder
	for _, err := range operations(t.Context(), newStore(t, cfg), "a") {
		fmt.Fprintf(&shown, "%v %+v %#v %#v\n", err, err, err, errors.Unwrap(err))
	}
	cfg.Endpoint = "https://s3.example"
	for _, err := range operations(t.Context(), newStore(t, cfg), "a") {
		fmt.Fprintln(&shown, err)
	}
	fmt.Fprintf(&shown, "%v %+v %#v %s %q\n", cfg, cfg, cfg, cfg.SecretKey, cfg.SecretKey)
	must(t, json.NewEncoder(&shown).Encode(cfg))
	slog.New(slog.NewJSONHandler(&shown, nil)).Info("open", "config", cfg)
	slog.New(slog.NewTextHandler(&shown, nil)).Info("open", "config", cfg)
	if text := shown.String(); strings.Contains(text, "hush") || !strings.Contains(text, "you said (secret)") {
		t.Errorf("shown: %s", text)
	}
}
