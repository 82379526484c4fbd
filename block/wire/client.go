package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"drover.io/drover/block"
)

// Error is the other node's answer instead of the requested one.
type Error struct{ Node, Kind, Message string }

func (e *Error) Error() string { return "node " + e.Node + ": " + e.Message }

// Times of a client. The client tries a read again while the other node is unreachable, often for a moment only.
const (
	callTime = time.Minute
	dialTime = 5 * time.Second
	tries    = 5
	tryPause = 200 * time.Millisecond
)

// Client reads layers of another node.
type Client struct {
	node string
	base string
	http *http.Client
}

// NewClient makes a client of the node at address. The caller closes the client.
func NewClient(id *Identity, node, address string) *Client {
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		cfg, err := id.Client(node)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, dialTime)
		defer cancel()
		return (&tls.Dialer{NetDialer: NewDialer(), Config: cfg}).DialContext(ctx, network, addr)
	}
	return &Client{node: node, base: "https://" + address, http: &http.Client{Transport: &http.Transport{
		DialTLSContext: dial, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute, DisableCompression: true,
		ReadBufferSize: 64 << 10}}}
}

// Close closes the idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// get asks once. The caller closes the answer's body.
func (c *Client) get(ctx context.Context, what string, v url.Values) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/v1/"+what+"?"+v.Encode(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("node %s cannot be reached: %w", c.node, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	f := failure{}
	if takeJSON(resp.Body, maxFacts, &f) != nil || f.Message == "" {
		f.Message = fmt.Sprintf("status %d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	}
	return nil, &Error{c.node, f.Kind[:min(len(f.Kind), maxID)], strings.ToValidUTF8(f.Message[:min(len(f.Message),
		maxMessage)], "")}
}

// callUntilAnswered asks until an answer comes, passes the answer to take, and tells whether take accepted the answer.
func (c *Client) callUntilAnswered(ctx context.Context, what string, v url.Values, take func(io.Reader) error) error {
	for try := 1; ; try++ {
		err := c.callOnce(ctx, what, v, take)
		var said *Error
		if err == nil || errors.As(err, &said) || errors.Is(err, errNonsense) || errors.Is(err, ErrNoCertificate) ||
			try == tries || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(tryPause << try):
		case <-ctx.Done():
			return err
		}
	}
}

func (c *Client) callOnce(ctx context.Context, what string, v url.Values, take func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	resp, err := c.get(ctx, what, v)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := take(resp.Body); err != nil {
		return fmt.Errorf("node %s: %w", c.node, err)
	}
	return nil
}

func layerQuery(disk, uid string) url.Values { return url.Values{"disk": {disk}, "uid": {uid}} }

// Image is the record of an image on a disk of the node.
func (c *Client) Image(ctx context.Context, disk, uid string) (img block.Image, err error) {
	err = c.callUntilAnswered(ctx, "image", layerQuery(disk, uid), func(r io.Reader) error {
		img = block.Image{}
		if err := takeJSON(r, maxImage, &img); err != nil {
			return err
		}
		return checkImage(img)
	})
	return img, err
}

// Digest is the root digest of a finished layer and the layer's bytes on the disk.
func (c *Client) Digest(ctx context.Context, disk, uid string) (root string, allocated int64, err error) {
	f, err := c.fetchFacts(ctx, disk, uid)
	return f.Root, f.Allocated, err
}

// Sums is the file of digests of a finished layer, which has at most the given number of bytes.
func (c *Client) Sums(ctx context.Context, disk, uid string, atMost int64) (b []byte, err error) {
	f, err := c.fetchFacts(ctx, disk, uid)
	if err != nil {
		return nil, err
	}
	if f.Size > atMost {
		return nil, fmt.Errorf("node %s: %w: layer %s has %d bytes, and may have %d", c.node, errNonsense, uid, f.Size,
			atMost)
	}
	err = c.callUntilAnswered(ctx, "sums", layerQuery(disk, uid), func(r io.Reader) error {
		most := maxFacts + (f.Size+block.ChunkSize-1)/block.ChunkSize*sumSize
		b, err = readAtMost(r, most)
		return err
	})
	return b, err
}

// Read reads a part of a finished layer, of 4 MiB at most. Read asks once.
func (c *Client) Read(ctx context.Context, disk, uid string, p []byte, off int64) error {
	v := layerQuery(disk, uid)
	v.Set("off", strconv.FormatInt(off, 10))
	v.Set("len", strconv.Itoa(len(p)))
	return c.callOnce(ctx, "data", v, func(body io.Reader) error {
		_, err := io.ReadFull(body, p)
		return err
	})
}

func (c *Client) fetchFacts(ctx context.Context, disk, uid string) (f layerFacts, err error) {
	err = c.callUntilAnswered(ctx, "layer", layerQuery(disk, uid), func(r io.Reader) error {
		f = layerFacts{}
		if err := takeJSON(r, maxFacts, &f); err != nil {
			return err
		}
		return f.check()
	})
	return f, err
}

// Send waits for a place among the transfers that the disk serves, and keeps the place until the caller calls end.
func (c *Client) Send(ctx context.Context, disk string) (end func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	resp, err := c.get(ctx, "send", url.Values{"disk": {disk}})
	if err != nil {
		cancel()
		return nil, err
	}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(io.Discard, resp.Body) }) // signs of life
	return func() {
		cancel()
		_ = resp.Body.Close()
		wg.Wait()
	}, nil
}

// Open opens a finished layer of the node for reading until ctx ends.
func (c *Client) Open(ctx context.Context, disk, uid string) (block.Source, error) {
	f, err := c.fetchFacts(ctx, disk, uid)
	if err != nil {
		return nil, err
	}
	return &remote{c: c, ctx: ctx, disk: disk, uid: uid, size: f.Size}, nil
}

// remote is a layer of another node.
type remote struct {
	c         *Client
	ctx       context.Context
	disk, uid string
	size      int64

	mu    sync.Mutex
	known []block.Extent // in order and without gaps, of one answer
}

func (r *remote) Size() int64  { return r.size }
func (r *remote) Close() error { return nil }

// ReadAt implements io.ReaderAt.
func (r *remote) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) && off+int64(n) < r.size {
		part := p[n:min(len(p), n+maxRead)]
		at := off + int64(n)
		part = part[:min(int64(len(part)), r.size-at)]
		v := layerQuery(r.disk, r.uid)
		v.Set("off", strconv.FormatInt(at, 10))
		v.Set("len", strconv.Itoa(len(part)))
		if err := r.c.callUntilAnswered(r.ctx, "data", v, func(body io.Reader) error {
			_, err := io.ReadFull(body, part)
			return err
		}); err != nil {
			return n, err
		}
		n += len(part)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Next implements block.Source.
func (r *remote) Next(off int64) (block.Extent, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.findExtent(off); ok {
		return e, nil
	}
	v := layerQuery(r.disk, r.uid)
	v.Set("off", strconv.FormatInt(off, 10))
	var list [][3]int64
	if err := r.c.callUntilAnswered(r.ctx, "extents", v, func(body io.Reader) error {
		list = nil
		if err := takeJSON(body, maxList, &list); err != nil {
			return err
		}
		if len(list) > maxExtents {
			return fmt.Errorf("%w: it lists %d extents, and may list %d", errNonsense, len(list), maxExtents)
		}
		return nil
	}); err != nil {
		return block.Extent{}, err
	}
	r.known = r.known[:0]
	end := off
	for _, x := range list {
		if x[0] != end || x[1] <= 0 || x[1]%block.Size != 0 || x[1] > r.size-end || x[2] < int64(block.Hole) ||
			x[2] > int64(block.Data) {
			return block.Extent{}, fmt.Errorf("node %s: %w: layer %s has %d bytes at %d", r.c.node, errNonsense, r.uid,
				x[1], x[0])
		}
		r.known = append(r.known, block.Extent{Off: x[0], Len: x[1], Kind: block.Kind(x[2])})
		end += x[1]
	}
	if e, ok := r.findExtent(off); ok {
		return e, nil
	}
	return block.Extent{}, fmt.Errorf("node %s: %w: the map of layer %s has no extent at %d", r.c.node, errNonsense,
		r.uid, off)
}

// findExtent finds the rest of the known extent that holds off.
func (r *remote) findExtent(off int64) (block.Extent, bool) {
	i := sort.Search(len(r.known), func(i int) bool { return r.known[i].End() > off })
	if i == len(r.known) || r.known[i].Off > off {
		return block.Extent{}, false
	}
	e := r.known[i]
	e.Len -= off - e.Off
	e.Off = off
	return e, true
}
