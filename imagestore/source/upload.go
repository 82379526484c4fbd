package source

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"drover.io/drover/api"
)

// UploadPath is the path below which uploads are taken; a token follows.
const UploadPath = "/v1/upload/"

// Uploads is the HTTP server of a node that takes images from users. An upload is expected first (Expect) and gets an
// address that nobody can guess; one transfer is taken there. The answer to the user is the outcome of the import, not
// of the transfer alone.
type Uploads struct {
	// Stall is how long a sender may be silent; 60 s when zero.
	Stall time.Duration

	ln   net.Listener
	base string

	mu      sync.Mutex
	waiting map[string]*Upload
}

// ListenUploads binds the server. host is what users reach this node by; empty: the address of listen.
func ListenUploads(listen, host string) (*Uploads, error) {
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
	base := "http://" + net.JoinHostPort(host, strconv.Itoa(addr.Port)) + UploadPath
	return &Uploads{ln: ln, base: base, waiting: map[string]*Upload{}}, nil
}

// Start serves until ctx ends, then cuts the transfers that are left and waits for their handlers.
func (u *Uploads) Start(ctx context.Context) error {
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
	for _, up := range u.waiting {
		up.cut()
	}
	u.mu.Unlock()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := srv.Shutdown(grace)
	if err != nil {
		err = srv.Close()
	}
	<-done
	return err
}

// NeedLeaderElection is false: every node takes its own uploads.
func (u *Uploads) NeedLeaderElection() bool { return false }

// Upload is one expected upload.
type Upload struct {
	URL string

	server *Uploads
	token  string
	size   int64 // as the image's owner said; 0: the request says it
	offer  chan *Stream
	result chan error // one outcome, for the sender

	mu    sync.Mutex
	taken *http.ResponseController
	ended bool
}

// Expect makes an address for one upload of size bytes (0: the request says how many). Close it in the end.
func (u *Uploads) Expect(size int64) *Upload {
	token := strings.ToLower(rand.Text())
	up := &Upload{URL: u.base + token, server: u, token: token, size: size,
		offer: make(chan *Stream), result: make(chan error, 1)}
	u.mu.Lock()
	u.waiting[token] = up
	u.mu.Unlock()
	return up
}

// Accept waits for the sender. When ctx ends, the transfer is cut.
func (up *Upload) Accept(ctx context.Context) (*Stream, error) {
	stop := context.AfterFunc(ctx, up.cut)
	select {
	case s := <-up.offer:
		s.ReadCloser.(*incoming).stop = stop
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close tells the sender the outcome and forgets the address. A transfer under way is cut.
func (up *Upload) Close(outcome error) {
	up.server.mu.Lock()
	delete(up.server.waiting, up.token)
	up.server.mu.Unlock()
	up.result <- outcome
	if outcome != nil {
		up.cut()
	}
}

// cut makes reads of the transfer fail now.
func (up *Upload) cut() {
	up.mu.Lock()
	defer up.mu.Unlock()
	up.ended = true
	if up.taken != nil {
		_ = up.taken.SetReadDeadline(time.Now())
	}
}

// take makes the transfer the only one.
func (up *Upload) take(rc *http.ResponseController) bool {
	up.mu.Lock()
	defer up.mu.Unlock()
	if up.taken != nil || up.ended {
		return false
	}
	up.taken = rc
	return true
}

// release lets another sender try: nothing of this one was read.
func (up *Upload) release() {
	up.mu.Lock()
	defer up.mu.Unlock()
	up.taken = nil
}

// letGo ends the hold on the connection: after its handler it may carry other requests.
func (up *Upload) letGo() {
	up.mu.Lock()
	defer up.mu.Unlock()
	if !up.ended {
		_ = up.taken.SetReadDeadline(time.Time{})
	}
	up.ended, up.taken = true, nil
}

// patience gives the sender time for the next bytes.
func (up *Upload) patience(d time.Duration) {
	up.mu.Lock()
	defer up.mu.Unlock()
	if !up.ended && up.taken != nil {
		_ = up.taken.SetReadDeadline(time.Now().Add(d))
	}
}

// ServeHTTP takes PUT with the image as the body, and POST of a multipart form with the image in its first file.
func (u *Uploads) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.URL.Path, UploadPath)
	u.mu.Lock()
	up := u.waiting[token]
	u.mu.Unlock()
	if !ok || up == nil {
		reply(w, http.StatusNotFound, "no upload is expected here")
		return
	}
	body, size, err := up.body(r)
	if err != nil {
		code := http.StatusBadRequest
		if api.Is(err, api.Unsupported) {
			code = http.StatusMethodNotAllowed
		}
		reply(w, code, err.Error())
		return
	}
	if !up.take(http.NewResponseController(w)) {
		reply(w, http.StatusConflict, "this upload is under way already")
		return
	}
	// One image, one connection: whatever cuts the transfer short must not meet another request.
	w.Header().Set("Connection", "close")
	in := &incoming{up: up, body: body, size: size, stall: u.Stall, done: make(chan struct{})}
	if in.stall == 0 {
		in.stall = 60 * time.Second
	}
	select {
	case up.offer <- &Stream{ReadCloser: in, Size: size, Name: "upload"}:
	case <-r.Context().Done():
		up.release()
		reply(w, http.StatusServiceUnavailable, "the connection ended before the image was asked for")
		return
	case err := <-up.result:
		reply(w, http.StatusGone, outcome(err))
		return
	}
	// The body may be read until this handler returns, so the reader has to let go of it first.
	<-in.done
	if err := <-up.result; err != nil {
		reply(w, http.StatusUnprocessableEntity, outcome(err))
		return
	}
	reply(w, http.StatusOK, "")
}

func outcome(err error) string {
	if err == nil {
		return "this upload is complete already"
	}
	return err.Error()
}

func reply(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	state := api.ImageReady
	if message != "" {
		state = api.ImageFailed
	}
	_ = json.NewEncoder(w).Encode(map[string]string{"state": string(state), "message": message})
}

// body finds the image in the request, and its size.
func (up *Upload) body(r *http.Request) (io.Reader, int64, error) {
	size := up.size
	if q := r.URL.Query().Get("size"); q != "" {
		n, err := strconv.ParseInt(q, 10, 64)
		if err != nil || n <= 0 {
			return nil, 0, api.Errorf(api.Invalid, "size=%q is not a number of bytes", q)
		}
		if size != 0 && size != n {
			return nil, 0, api.Errorf(api.Invalid, "size=%d differs from the image's parameter size (%d)", n, size)
		}
		size = n
	}
	form := false
	switch r.Method {
	case http.MethodPut:
	case http.MethodPost:
		kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		form = kind == "multipart/form-data"
	default:
		return nil, 0, api.Errorf(api.Unsupported, "send the image with PUT, or with POST as a multipart form")
	}
	if !form {
		if n := r.ContentLength; n >= 0 {
			if size != 0 && size != n {
				return nil, 0, api.Errorf(api.Invalid, "%d bytes are announced, but the size is to be %d", n, size)
			}
			size = n
		}
		if size == 0 {
			return nil, 0, api.Errorf(api.Invalid, "the size is missing: add ?size=<bytes> to the address")
		}
		return r.Body, size, nil
	}
	if size == 0 {
		return nil, 0, api.Errorf(api.Invalid, "the size is missing: add ?size=<bytes> to the address")
	}
	mr, err := r.MultipartReader()
	if err != nil {
		return nil, 0, api.Errorf(api.Invalid, "the form cannot be read: %w", err)
	}
	for {
		part, err := mr.NextPart()
		if err != nil {
			return nil, 0, api.Errorf(api.Invalid, "no file in the form: %w", err)
		}
		if isFile(part) {
			return part, size, nil
		}
	}
}

func isFile(p *multipart.Part) bool { return p.FileName() != "" || p.FormName() == "chunk" }

// incoming is the body of an upload; it ends with an error unless exactly size bytes came.
type incoming struct {
	up    *Upload
	body  io.Reader
	size  int64
	off   int64
	stall time.Duration

	stop func() bool // lets go of the context that would cut it
	once sync.Once
	done chan struct{}
}

func (in *incoming) Read(p []byte) (int, error) {
	in.up.patience(in.stall)
	n, err := in.body.Read(p)
	in.off += int64(n)
	var ne net.Error
	switch {
	case in.off > in.size:
		return 0, api.Errorf(api.Invalid, "the upload is larger than announced (%d bytes)", in.size)
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF) && in.off == in.size:
		return n, io.EOF
	case errors.As(err, &ne) && ne.Timeout() && !in.up.isEnded():
		return n, api.Errorf(api.Unavailable, "the upload stopped: the sender was silent for %s after %d of %d bytes",
			in.stall, in.off, in.size)
	}
	return n, api.Errorf(api.Unavailable, "the upload ended early, after %d of %d bytes", in.off, in.size)
}

func (up *Upload) isEnded() bool {
	up.mu.Lock()
	defer up.mu.Unlock()
	return up.ended
}

// Close lets go of the request's body.
func (in *incoming) Close() error {
	in.once.Do(func() {
		in.stop()
		// Nothing may touch the connection's deadline from here on: other requests come over it.
		in.up.letGo()
		close(in.done)
	})
	return nil
}
