package upload

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Path is the path below which uploads are taken; a token follows.
const Path = "/v1/upload/"

// Server is the HTTP server of a node that takes images from users. An upload is expected first (Expect) and gets an
// address that nobody can guess. It is sent there in one request, or in several where a connection was cut: what came
// is kept, and GET says how much that is. The answer to the user is the outcome of the import, not of the transfer
// alone.
type Server struct {
	// Stall is how long a sender may be silent; 60 s when zero. Then its connection counts as cut.
	Stall time.Duration
	// Patience is how long a sender may take to come back; 5 min when zero.
	Patience time.Duration

	ln   net.Listener
	base string

	mu      sync.Mutex
	waiting map[string]*Upload
	ending  bool
}

// Listen binds the server. host is what users reach this node by; empty: the address of listen. With a
// certificate, TLS is spoken.
func Listen(listen, host string, cert *tls.Certificate) (*Server, error) {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "uploads cannot be taken on %s: %w", listen, err)
	}
	addr := ln.Addr().(*net.TCPAddr)
	if host == "" {
		host = addr.IP.String()
		if addr.IP.IsUnspecified() {
			host = "127.0.0.1"
		}
	}
	scheme := "http://"
	if cert != nil {
		scheme = "https://"
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12})
	}
	base := scheme + net.JoinHostPort(host, strconv.Itoa(addr.Port)) + Path
	return &Server{ln: ln, base: base, waiting: map[string]*Upload{}}, nil
}

// Start serves until ctx ends, then cuts the transfers that are left and waits for their handlers.
func (u *Server) Start(ctx context.Context) error {
	srv := &http.Server{Handler: u, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(u.ln) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	u.mu.Lock()
	u.ending = true
	for _, up := range u.waiting {
		up.cut(context.Canceled)
	}
	u.mu.Unlock()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := srv.Shutdown(grace)
	if err != nil {
		err = srv.Close()
	}
	<-done //nolint:errcheck // the server was closed: that is its error
	return err
}

// NeedLeaderElection is false: every node takes its own uploads.
func (u *Server) NeedLeaderElection() bool { return false }

// Expect makes an address for one upload of size bytes (0: the first request says how many). Close it in the end. last
// is the address that an earlier process had for it, or empty: where it can be had again, it is.
func (u *Server) Expect(size int64, last string) *Upload {
	token := strings.ToLower(rand.Text())
	if _, t, ok := strings.Cut(last, Path); ok && len(t) == len(token) {
		token = t
	}
	return u.expect(token, size)
}

// Continue expects the rest of an upload from its Mark on, under the address that it had if the node is reached as it
// was. It fails when nobody comes for as long as a sender may take.
func (u *Server) Continue(from origin.Mark) *Upload {
	up := u.expect(from.Validator, from.Size)
	up.mu.Lock()
	defer up.mu.Unlock()
	up.off, up.crc, up.again = from.Off, from.CRC, true
	return up
}

func (u *Server) expect(token string, size int64) *Upload {
	up := &Upload{URL: u.base + token, srv: u, token: token, size: size, parts: make(chan *part),
		closed: make(chan struct{})}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.waiting[token] = up
	if u.ending {
		up.cut(context.Canceled)
	}
	return up
}

func (u *Server) stall() time.Duration {
	if u.Stall == 0 {
		return 60 * time.Second
	}
	return u.Stall
}

func (u *Server) patience() time.Duration {
	if u.Patience == 0 {
		return 5 * time.Minute
	}
	return u.Patience
}

// State is what GET says of an upload.
type State struct {
	State   api.ImageState `json:"state"`
	Message string         `json:"message,omitempty"`
	// Offset is how many bytes are there, and where a request is to continue; CRC32C is over them.
	Offset int64  `json:"offset"`
	CRC32C uint32 `json:"crc32c"`
	Size   int64  `json:"size,omitempty"`
	// Sending: somebody sends now.
	Sending bool `json:"sending,omitempty"`
}

// ServeHTTP takes PUT with the image as the body, POST of a multipart form with the image in its first file, and GET,
// which says how far the upload is. A request with Content-Range continues it.
func (u *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.URL.Path, Path)
	u.mu.Lock()
	up := u.waiting[token]
	u.mu.Unlock()
	if !ok || up == nil {
		reply(w, http.StatusNotFound, State{State: api.ImageFailed, Message: "no upload is expected here"})
		return
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		reply(w, http.StatusOK, up.now())
		return
	}
	refuse := func(code int, message string) {
		s := up.now()
		s.Message = message
		select {
		case <-up.closed:
			s.State = api.ImageFailed
		default: // the request failed, and the upload waits for another one
		}
		reply(w, code, s)
	}
	p, err := up.read(r)
	if err != nil {
		code := http.StatusBadRequest
		if api.Is(err, api.Unsupported) {
			code = http.StatusMethodNotAllowed
			w.Header().Set("Allow", "GET, HEAD, PUT, POST")
		}
		refuse(code, err.Error())
		return
	}
	p.rc = http.NewResponseController(w)
	// One image, one connection: whatever cuts the transfer short must not meet another request.
	w.Header().Set("Connection", "close")
	if err := up.enter(r.Context(), p); err != nil {
		refuse(http.StatusConflict, err.Error())
		return
	}
	select {
	case up.parts <- p:
	case <-r.Context().Done():
		up.leave(p)
		refuse(http.StatusServiceUnavailable, "the connection ended before the image was asked for")
		return
	case <-p.kicked:
		up.leave(p)
		refuse(http.StatusConflict, "another request continues this upload")
		return
	case <-up.closed:
		up.leave(p)
		refuse(http.StatusGone, up.said())
		return
	}
	// The body may be read until this handler returns, so the reader has to let go of it first.
	<-p.done
	switch {
	case p.err != nil:
		refuse(http.StatusConflict, p.err.Error())
		return
	case up.going():
		reply(w, http.StatusAccepted, up.now())
		return
	}
	<-up.closed
	if errors.Is(up.outcome, context.Canceled) {
		refuse(http.StatusServiceUnavailable, "the node stops: what came is kept, and the upload goes on when it is back")
		return
	}
	if up.outcome != nil {
		refuse(http.StatusUnprocessableEntity, up.said())
		return
	}
	s := up.now()
	s.State = api.ImageReady
	reply(w, http.StatusOK, s)
}

func reply(w http.ResponseWriter, code int, s State) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // people read it
	_ = e.Encode(s)
}

var _ io.ReadCloser = (*Upload)(nil)
