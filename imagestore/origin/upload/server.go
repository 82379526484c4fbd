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

// Path is the path of uploads; a token follows.
const Path = "/v1/upload/"

// Server is the HTTP server of a node for uploads. The importer expects an upload (Expect) and gets an address with a
// secret token. The sender sends the image in one request, or in several requests after cuts: received bytes stay, and
// GET returns their number. The answer to the sender is the outcome of the import, not of the transfer alone.
type Server struct {
	// Stall is how long a sender may be silent; 60 s when zero. Then its connection counts as cut.
	Stall time.Duration
	// ResumeTimeout is how long the server waits for a sender to continue; 5 min when zero.
	ResumeTimeout time.Duration

	ln   net.Listener
	base string

	mu       sync.Mutex
	expected map[string]*Upload
	ending   bool
}

// Listen binds the server. host is the name or address of this node for users; empty: the address of listen. A
// certificate turns TLS on.
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
	return &Server{ln: ln, base: base, expected: map[string]*Upload{}}, nil
}

// Start serves until ctx ends, then cuts all transfers and waits for their handlers.
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
	for _, up := range u.expected {
		up.failReads(context.Canceled)
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

// Expect returns an address for one upload of size bytes (0: the first request has the size). Call Finish in the end.
// last is the address from an earlier process, or empty; Expect returns the same address if possible.
func (u *Server) Expect(size int64, last string) *Upload {
	token := strings.ToLower(rand.Text())
	if _, t, ok := strings.Cut(last, Path); ok && len(t) == len(token) {
		token = t
	}
	return u.expectUpload(token, size)
}

// Continue expects the rest of an upload from its Mark on, under the same address if the address of the node is
// unchanged. Continue fails without a sender after ResumeTimeout.
func (u *Server) Continue(from origin.Mark) *Upload {
	up := u.expectUpload(from.Validator, from.Size)
	up.mu.Lock()
	defer up.mu.Unlock()
	up.off, up.crc, up.continued = from.Off, from.CRC, true
	return up
}

func (u *Server) expectUpload(token string, size int64) *Upload {
	up := &Upload{URL: u.base + token, srv: u, token: token, size: size, requests: make(chan *request),
		closed: make(chan struct{})}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.expected[token] = up
	if u.ending {
		up.failReads(context.Canceled)
	}
	return up
}

func (u *Server) stallTimeout() time.Duration {
	if u.Stall == 0 {
		return 60 * time.Second
	}
	return u.Stall
}

func (u *Server) resumeTimeout() time.Duration {
	if u.ResumeTimeout == 0 {
		return 5 * time.Minute
	}
	return u.ResumeTimeout
}

// State is the answer to GET for an upload.
type State struct {
	State   api.ImageState `json:"state"`
	Message string         `json:"message,omitempty"`
	// Offset is the number of received bytes, where a request has to continue; CRC32C covers these bytes.
	Offset int64  `json:"offset"`
	CRC32C uint32 `json:"crc32c"`
	Size   int64  `json:"size,omitempty"`
	// Sending: a request is sending now.
	Sending bool `json:"sending,omitempty"`
}

// ServeHTTP takes PUT with the image as the body, POST of a multipart form with the image in its first file, and GET
// for the state of the upload. A request with Content-Range continues the upload.
func (u *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.URL.Path, Path)
	u.mu.Lock()
	up := u.expected[token]
	u.mu.Unlock()
	if !ok || up == nil {
		writeReply(w, http.StatusNotFound, State{State: api.ImageFailed, Message: "no upload is expected here"})
		return
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		writeReply(w, http.StatusOK, up.currentState())
		return
	}
	refuse := func(code int, message string) {
		s := up.currentState()
		s.Message = message
		select {
		case <-up.closed:
			s.State = api.ImageFailed
		default: // the upload waits for another request
		}
		writeReply(w, code, s)
	}
	p, err := up.parseRequest(r)
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
	if err := up.takeTurn(r.Context(), p); err != nil {
		refuse(http.StatusConflict, err.Error())
		return
	}
	select {
	case up.requests <- p:
	case <-r.Context().Done():
		up.leaveTurn(p)
		refuse(http.StatusServiceUnavailable, "the connection ended before the image was asked for")
		return
	case <-p.replaced:
		up.leaveTurn(p)
		refuse(http.StatusConflict, "another request continues this upload")
		return
	case <-up.closed:
		up.leaveTurn(p)
		refuse(http.StatusGone, up.outcomeText())
		return
	}
	// The body is valid until the handler returns, so the reader has to finish first.
	<-p.done
	switch {
	case p.err != nil:
		refuse(http.StatusConflict, p.err.Error())
		return
	case up.expectsMore():
		writeReply(w, http.StatusAccepted, up.currentState())
		return
	}
	<-up.closed
	if errors.Is(up.outcome, context.Canceled) {
		refuse(http.StatusServiceUnavailable, "the node stops: it keeps the received bytes, and the upload can "+
			"continue when it is back")
		return
	}
	if up.outcome != nil {
		refuse(http.StatusUnprocessableEntity, up.outcomeText())
		return
	}
	s := up.currentState()
	s.State = api.ImageReady
	writeReply(w, http.StatusOK, s)
}

func writeReply(w http.ResponseWriter, code int, s State) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // people read it
	_ = e.Encode(s)
}

var _ io.ReadCloser = (*Upload)(nil)
