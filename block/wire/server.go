package wire

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/listener"
)

// The protocol is HTTP/1.1 over mutual TLS, so that a transfer has as many connections as it has readers:
//
//	GET /v1/image?disk=D&uid=U            the disk's record of an image, as JSON
//	GET /v1/layer?disk=D&uid=U            size, root digest and bytes on the disk of a finished layer, as JSON
//	GET /v1/extents?disk=D&uid=U&off=O    what the layer holds from O on: a JSON list of [off, len, kind], some of it
//	GET /v1/data?disk=D&uid=U&off=O&len=N N bytes
//	GET /v1/sums?disk=D&uid=U             the file of digests of a finished layer
//	GET /v1/send?disk=D                   is answered when the disk may serve one more; lasts until the connection ends
//
// An error is a status of 400 or more and {"kind": ..., "message": ...}.
const (
	maxRead    = 4 << 20
	maxExtents = 4096
	idleSource = 30 * time.Second
)

// ServerOptions configure a Server.
type ServerOptions struct {
	Identity *Identity
	// Disk finds a disk of this node.
	Disk func(uid string) (block.Layers, error)
	// Allow decides whether a node may read a layer, or the record of an image, of a disk; without a uid, whether the
	// node may take a place among the transfers that the disk serves. Nil: every node may.
	Allow func(ctx context.Context, node, disk, uid string) error
	// Send waits until a disk may serve one more transfer; the returned function ends the transfer. nil: any number.
	Send func(ctx context.Context, disk string) (end func(), err error)
	// Kind names the kind of an error, for the other side.
	Kind func(error) string
	Log  *slog.Logger
	// Listen bounds the connections; the server sets Name and Log.
	Listen listener.Options
}

// Server serves finished layers to other nodes.
type Server struct {
	ServerOptions
	mu       sync.Mutex
	sources  map[[2]string]*openSource
	closed   bool
	lastRead map[string]time.Time // of each node that has read
	buffers  sync.Pool
	idleSend time.Duration // a node that reads nothing for so long loses its place
}

// openSource is a layer that a node asked for a moment ago.
type openSource struct {
	ready chan struct{} // closed when src or err is set
	src   block.Source
	err   error
	users int
	idle  *time.Timer
}

// NewServer makes a Server.
func NewServer(o ServerOptions) *Server {
	s := &Server{ServerOptions: o, sources: map[[2]string]*openSource{}, lastRead: map[string]time.Time{},
		idleSend: 10 * time.Minute}
	s.buffers.New = func() any { b := make([]byte, maxRead); return &b }
	return s
}

// Serve answers on ln until ctx ends.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/image", s.requireUIDs(s.serveImage, "disk", "uid"))
	mux.HandleFunc("GET /v1/layer", s.requireUIDs(s.serveLayer, "disk", "uid"))
	mux.HandleFunc("GET /v1/extents", s.requireUIDs(s.serveExtents, "disk", "uid"))
	mux.HandleFunc("GET /v1/data", s.requireUIDs(s.serveData, "disk", "uid"))
	mux.HandleFunc("GET /v1/sums", s.requireUIDs(s.serveSums, "disk", "uid"))
	mux.HandleFunc("GET /v1/send", s.requireUIDs(s.serveSend, "disk"))
	h := &http.Server{Handler: s.requireAllowed(mux), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug)}
	stopped := make(chan struct{})
	end := context.AfterFunc(ctx, func() {
		defer close(stopped)
		_ = h.Close()
	})
	bounds := s.Listen
	bounds.Name, bounds.Log = "layers", s.Log
	if bounds.PerSource == 0 {
		bounds.PerSource = 64 // one node reads a layer by several connections
	}
	if bounds.PerPeer == 0 {
		bounds.PerPeer = 256
	}
	err := h.Serve(tls.NewListener(listener.Wrap(ln, bounds), s.Identity.Server()))
	if !end() {
		<-stopped
	}
	s.close()
	if ctx.Err() != nil && errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve layers: %w", err)
}

// requireAllowed lets requests through that the asking node may make.
func (s *Server) requireAllowed(to http.Handler) http.Handler {
	if s.Allow == nil {
		return to
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		node, err := NodeOf(*r.TLS)
		if err == nil {
			err = s.Allow(r.Context(), node, r.FormValue("disk"), r.FormValue("uid"))
		}
		if err != nil {
			s.answerError(w, err)
			return
		}
		to.ServeHTTP(w, r)
	})
}

func (s *Server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for key, o := range s.sources {
		if o.users == 0 {
			s.closeSource(key, o)
		}
	}
}

// closeSource closes an unused source. The caller has the lock.
func (s *Server) closeSource(key [2]string, o *openSource) {
	if o.idle != nil {
		o.idle.Stop()
	}
	delete(s.sources, key)
	if o.src != nil {
		_ = o.src.Close()
	}
}

// requireUIDs answers a request only if the uids in the request are well-formed.
func (s *Server) requireUIDs(answer http.HandlerFunc, names ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for _, name := range names {
			what := name
			if what == "uid" {
				what = "layer or image"
			}
			if err := checkID(what, r.FormValue(name)); err != nil {
				s.answerError(w, err)
				return
			}
		}
		answer(w, r)
	}
}

// openLayer opens a layer, or returns the already open one; the caller gives the layer back with done.
func (s *Server) openLayer(disk, uid string) (src block.Source, done func(), err error) {
	key := [2]string{disk, uid}
	s.mu.Lock()
	o := s.sources[key]
	first := o == nil
	if first {
		o = &openSource{ready: make(chan struct{})}
		s.sources[key] = o
	}
	o.users++
	if o.idle != nil {
		o.idle.Stop()
	}
	s.mu.Unlock()
	if first {
		var on block.Layers
		if on, o.err = s.Disk(disk); o.err == nil {
			o.src, o.err = on.Open(uid)
		}
		close(o.ready)
	}
	<-o.ready
	done = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if o.users--; o.users > 0 {
			return
		}
		if o.err != nil || s.closed {
			if s.sources[key] == o {
				s.closeSource(key, o)
			}
			return
		}
		o.idle = time.AfterFunc(idleSource, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if o.users == 0 && s.sources[key] == o {
				s.closeSource(key, o)
			}
		})
	}
	if o.err != nil {
		done()
		return nil, nil, o.err
	}
	return o.src, done, nil
}

type failure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

func (s *Server) answerError(w http.ResponseWriter, err error) {
	f := failure{Message: err.Error()}
	if s.Kind != nil {
		f.Kind = s.Kind(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusUnprocessableEntity)
	_ = json.NewEncoder(w).Encode(f)
}

func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// serveImage answers with a disk's record of an image.
func (s *Server) serveImage(w http.ResponseWriter, r *http.Request) {
	on, err := s.Disk(r.FormValue("disk"))
	if err != nil {
		s.answerError(w, err)
		return
	}
	uid := r.FormValue("uid")
	if d, ok := on.(interface {
		Image(uid string) (block.Image, error)
	}); ok {
		img, err := d.Image(uid)
		if err != nil {
			s.answerError(w, err)
			return
		}
		answerJSON(w, img)
		return
	}
	imgs, err := on.Images()
	for _, img := range imgs {
		if img.UID == uid {
			answerJSON(w, img)
			return
		}
	}
	if err == nil {
		err = fmt.Errorf("image %s is not on disk %s", uid, on.UID())
	}
	s.answerError(w, err)
}

type layerFacts struct {
	Size      int64  `json:"size"`
	Root      string `json:"root"`
	Allocated int64  `json:"allocated"`
}

func (s *Server) serveLayer(w http.ResponseWriter, r *http.Request) {
	disk, uid := r.FormValue("disk"), r.FormValue("uid")
	on, err := s.Disk(disk)
	var f layerFacts
	if err == nil {
		f.Root, f.Allocated, err = on.Digest(uid)
	}
	if err == nil {
		var src block.Source
		var done func()
		if src, done, err = s.openLayer(disk, uid); err == nil {
			f.Size = src.Size()
			done()
		}
	}
	if err != nil {
		s.answerError(w, err)
		return
	}
	answerJSON(w, f)
}

func (s *Server) serveExtents(w http.ResponseWriter, r *http.Request) {
	src, done, err := s.openLayer(r.FormValue("disk"), r.FormValue("uid"))
	if err != nil {
		s.answerError(w, err)
		return
	}
	defer done()
	off, err := parseNumber(r, "off", src.Size())
	var list [][3]int64
	for err == nil && off < src.Size() && len(list) < maxExtents && r.Context().Err() == nil {
		var e block.Extent
		if e, err = src.Next(off); err != nil {
			break
		}
		n := len(list)
		if n > 0 && list[n-1][2] == int64(e.Kind) {
			list[n-1][1] += e.End() - off
		} else {
			list = append(list, [3]int64{off, e.End() - off, int64(e.Kind)})
		}
		off = e.End()
	}
	if err != nil {
		s.answerError(w, err)
		return
	}
	answerJSON(w, list)
}

// parseNumber reads a form value from 0 to most.
func parseNumber(r *http.Request, name string, most int64) (int64, error) {
	n, err := strconv.ParseInt(r.FormValue(name), 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, fmt.Errorf("%s=%.40q is not from 0 to %d", name, r.FormValue(name), most)
	}
	return n, nil
}

func (s *Server) serveData(w http.ResponseWriter, r *http.Request) {
	src, done, err := s.openLayer(r.FormValue("disk"), r.FormValue("uid"))
	if err != nil {
		s.answerError(w, err)
		return
	}
	defer done()
	off, err := parseNumber(r, "off", src.Size())
	var n int64
	if err == nil {
		n, err = parseNumber(r, "len", min(maxRead, src.Size()-off))
	}
	if err != nil {
		s.answerError(w, err)
		return
	}
	b := s.buffers.Get().(*[]byte)
	defer s.buffers.Put(b)
	buf := (*b)[:n]
	if k, err := src.ReadAt(buf, off); k < len(buf) {
		s.answerError(w, fmt.Errorf("read: %w", err))
		return
	}
	s.noteRead(r)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	_, _ = w.Write(buf)
}

// serveSums answers with the digests of a layer.
func (s *Server) serveSums(w http.ResponseWriter, r *http.Request) {
	on, err := s.Disk(r.FormValue("disk"))
	var b []byte
	if err == nil {
		d, ok := on.(interface {
			Sums(uid string) ([]byte, error)
		})
		if !ok {
			err = fmt.Errorf("disk %s does not tell its digests", on.UID())
		} else {
			b, err = d.Sums(r.FormValue("uid"))
		}
	}
	if err != nil {
		s.answerError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b)
}

// noteRead notes that a node has read.
func (s *Server) noteRead(r *http.Request) {
	node := askerOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastRead[node] = time.Now()
}

// idleTime is for how long a node has read nothing, from some moment on.
func (s *Server) idleTime(r *http.Request, since time.Time) time.Duration {
	node := askerOf(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := s.lastRead[node]; last.After(since) {
		since = last
	}
	return time.Since(since)
}

// askerOf is the asking node, by the node's certificate.
func askerOf(r *http.Request) string {
	if r.TLS == nil {
		return ""
	}
	node, err := NodeOf(*r.TLS)
	if err != nil {
		return ""
	}
	return node
}

// serveSend gives the node a place among the transfers that a disk serves.
func (s *Server) serveSend(w http.ResponseWriter, r *http.Request) {
	disk := r.FormValue("disk")
	if _, err := s.Disk(disk); err != nil {
		s.answerError(w, err)
		return
	}
	if s.Send != nil {
		end, err := s.Send(r.Context(), disk)
		if err != nil {
			s.answerError(w, err)
			return
		}
		defer end()
	}
	w.WriteHeader(http.StatusOK)
	if err := http.NewResponseController(w).Flush(); err != nil {
		return
	}
	// The ticker notices a node that was cut off, and the node's place becomes free.
	alive := time.NewTicker(min(5*time.Second, s.idleSend/4))
	defer alive.Stop()
	began := time.Now()
	for {
		select {
		case <-r.Context().Done():
			return
		case <-alive.C:
			if s.idleTime(r, began) > s.idleSend {
				return // others wait for the place
			}
			rc := http.NewResponseController(w)
			_ = rc.SetWriteDeadline(time.Now().Add(20 * time.Second))
			if _, err := w.Write([]byte{'.'}); err != nil {
				return
			}
			if err := rc.Flush(); err != nil {
				return
			}
		}
	}
}
