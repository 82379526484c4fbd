package registry

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
)

// guardian asks for credentials before the registry, as "basic" or as "bearer" with a token service of its own. A token
// expires after uses requests.
type guardian struct {
	how  string
	uses int32

	base   string
	left   atomic.Int32
	tokens atomic.Int32
}

func (g *guardian) door(w http.ResponseWriter, r *http.Request, next http.Handler) {
	user, pass, _ := r.BasicAuth()
	good := user == "robot$x" && pass == "hunter2"
	deny := func(challenge string) {
		w.Header().Set("WWW-Authenticate", challenge)
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"hunter2\nsignature="}]}`)
	}
	bearer := fmt.Sprintf(`Bearer realm="%s/token",service="reg",scope="repository:a:pull"`, g.base)
	switch {
	case r.URL.Path == "/token" && good && r.URL.Query().Get("scope") == "repository:a:pull":
		g.left.Store(g.uses)
		_, _ = fmt.Fprintf(w, `{"access_token":"t%d","expires_in":60}`, g.tokens.Add(1))
	case r.URL.Path == "/token":
		deny("Basic")
	case g.how == "basic" && good:
		next.ServeHTTP(w, r)
	case g.how == "basic":
		deny(`Basic realm="reg"`)
	case r.URL.Path != "/v2/" && r.Header.Get("Authorization") == fmt.Sprintf("Bearer t%d", g.tokens.Load()) &&
		g.left.Add(-1) >= 0:
		next.ServeHTTP(w, r)
	default:
		deny(bearer)
	}
}

func TestCredentials(t *testing.T) {
	body := noise(1 << 20)
	for _, how := range []string{"basic", "bearer"} {
		t.Run(how, func(t *testing.T) {
			w := plainWorld(t)
			g := &guardian{how: how, uses: 100, base: w.url}
			w.image("a", "1", disked(t, body))
			w.door = g.door
			o := quick
			_, _, err := fetch(t, w.ref("a:1"), o)
			fails(t, err, api.Denied, "wants credentials")
			o.Username, o.Password = "robot$x", "wrong hunter2"
			_, _, err = fetch(t, w.ref("a:1"), o)
			fails(t, err, api.Denied, "refuses these credentials")
			o.Password = ""
			_, _, err = fetch(t, w.ref("a:1"), o)
			fails(t, err, api.Invalid, "a username and a password")
			o.Password = "hunter2"
			same(t, w.ref("a:1"), o, body)

			// A token for two requests: the manifest, the layer; then the layer is cut, and the token has expired.
			g.uses = 2
			var n atomic.Int32
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				if isBlob(r) && r.Header.Get("Authorization") != "" && n.Add(1) == 1 {
					rw = &cutter{rw, 500_000}
				}
				g.door(rw, r, next)
			}
			before := g.tokens.Load()
			same(t, w.ref("a:1"), o, body)
			if got := g.tokens.Load() - before; how == "bearer" && got != 2 {
				t.Errorf("%d tokens were fetched, want 2", got)
			}
		})
	}
}

// TestCredentialsStayWithTheRegistry: layers are often on another server, which must not see the registry's
// credentials.
func TestCredentialsStayWithTheRegistry(t *testing.T) {
	body := noise(1 << 20)
	for _, how := range []string{"basic", "bearer"} {
		t.Run(how, func(t *testing.T) {
			w := plainWorld(t)
			g := &guardian{how: how, uses: 100, base: w.url}
			w.image("a", "1", disked(t, body))
			var n, leaks atomic.Int32
			store := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
					leaks.Add(1)
				}
				if r.URL.Query().Get("signature") != "abc" {
					rw.WriteHeader(http.StatusForbidden)
					return
				}
				if n.Add(1) == 1 {
					rw = &cutter{rw, 400_000}
				}
				w.reg.ServeHTTP(rw, r)
			}))
			t.Cleanup(store.Close)
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				g.door(rw, r, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					if isBlob(r) {
						to, _ := url.Parse(store.URL)
						to.Path, to.RawQuery = r.URL.Path, "signature=abc"
						http.Redirect(rw, r, to.String(), http.StatusTemporaryRedirect)
						return
					}
					next.ServeHTTP(rw, r)
				}))
			}
			o := quick
			o.Username, o.Password = "robot$x", "hunter2"
			same(t, w.ref("a:1"), o, body)
			if leaks.Load() != 0 || n.Load() != 2 {
				t.Errorf("%d requests to the store, %d of them with credentials; want 2 and 0", n.Load(), leaks.Load())
			}
			if all, _ := w.blobs(); all < 2 {
				t.Errorf("the resume did not ask the registry for a new signature: %v", w.log)
			}
		})
	}
}
