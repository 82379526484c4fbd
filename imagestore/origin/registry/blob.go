package registry

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// blob is the bytes of one layer in the registry, over any number of connections. After the last byte, Read compares
// the digest: io.EOF means a match. The goroutine that reads owns the blob; any goroutine may call finalError.
type blob struct {
	ctx  context.Context
	c    *client
	want v1.Descriptor
	sum  hash.Hash

	off      int64 // next byte
	skip     int64 // bytes that the current connection repeats
	noRanges bool  // the server sends no parts

	body   io.ReadCloser
	cuts   int // in a row
	states origin.HashStates

	mu  sync.Mutex
	err error // final
}

// finalError returns the final error.
func (b *blob) finalError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *blob) setFailure(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
}

// openBlob opens a blob at off, with the state of the digest there; nil at the start.
func (c *client) openBlob(ctx context.Context, want v1.Descriptor, off int64, state []byte) (*blob, error) {
	sum, err := v1.Hasher(want.Digest.Algorithm)
	if err != nil {
		return nil, api.Errorf(api.Unsupported, "%s: a layer's digest: %w", c.name, err)
	}
	b := &blob{ctx: ctx, c: c, want: want, sum: sum}
	if state != nil {
		if err := b.restoreAt(off, state); err != nil {
			return nil, err
		}
	}
	b.states.Record(b.off, b.sum)
	if b.off == want.Size && b.off > 0 {
		return b, nil // complete already
	}
	return b, b.requestRest()
}

// requestRest requests the bytes from off on.
func (b *blob) requestRest() error {
	header := http.Header{}
	part := b.off > 0 && !b.noRanges
	if part {
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", b.off, b.want.Size-1))
	}
	resp, err := b.c.getBlob(b.ctx, b.want.Digest.String(), header)
	if err != nil {
		return err
	}
	if err := b.checkAnswer(resp, part); err != nil {
		_ = resp.Body.Close()
		return err
	}
	b.body = resp.Body
	return nil
}

// checkAnswer checks the head of an answer. The digest identifies the bytes, so an answer with all bytes serves as well
// as an answer with the rest.
func (b *blob) checkAnswer(resp *http.Response, part bool) error {
	from := int64(0)
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode == http.StatusPartialContent && part:
		from = b.off
		if got := resp.Header.Get("Content-Range"); !strings.HasPrefix(got, "bytes "+strconv.FormatInt(from, 10)+"-") {
			b.noRanges = true
			return api.Errorf(api.Unavailable, "%s: the registry answered a request for the rest with another range (%q)",
				b.c.name, clipText(got))
		}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		b.noRanges = true
		return b.c.statusError(resp.StatusCode, "")
	default:
		return b.c.statusError(resp.StatusCode, "layer "+b.want.Digest.String())
	}
	if n := resp.ContentLength; n >= 0 && n != b.want.Size-from {
		return api.Errorf(api.Corrupt, "%s: layer %s has %d bytes on the registry, and %d in the manifest", b.c.name,
			b.want.Digest, n+from, b.want.Size)
	}
	b.skip = b.off - from
	return nil
}

// Read returns the next bytes, over a new connection after a cut.
func (b *blob) Read(p []byte) (int, error) {
	for b.finalError() == nil && len(p) > 0 {
		if b.off == b.want.Size {
			b.setFailure(b.verifyDigest())
			b.endRequest()
			break
		}
		n, err := b.body.Read(p[:min(int64(len(p)), b.skip+b.want.Size-b.off)])
		again := min(b.skip, int64(n))
		b.skip -= again
		if n -= int(again); n > 0 {
			copy(p, p[again:int(again)+n])
			_, _ = b.sum.Write(p[:n])
			b.off += int64(n)
			b.states.Record(b.off, b.sum)
			b.cuts = 0
			return n, nil // the next Read returns the error again
		}
		if err != nil {
			b.setFailure(b.resumeTransfer(err))
		}
	}
	return 0, b.finalError()
}

// verifyDigest compares the digest; io.EOF is a match.
func (b *blob) verifyDigest() error {
	if got := fmt.Sprintf("%x", b.sum.Sum(nil)); got != b.want.Digest.Hex {
		return api.Errorf(api.Corrupt, "%s: the registry sent other bytes than those of layer %s: their digest is %s:%s",
			b.c.name, b.want.Digest, b.want.Digest.Algorithm, got)
	}
	return io.EOF
}

// resumeTransfer requests the rest after a cut, or returns why the rest cannot be had.
func (b *blob) resumeTransfer(err error) error {
	b.endRequest()
	for ; b.cuts < b.c.opts.Resumes; b.cuts++ {
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
		if b.c.opts.Resumed != nil {
			b.c.opts.Resumed(b.off, err)
		}
		if err := origin.Pause(b.ctx, b.c.opts.Pause<<b.cuts); err != nil {
			return err
		}
		oerr := b.requestRest()
		if oerr == nil {
			b.cuts++
			return nil
		}
		if b.ctx.Err() != nil || !api.Is(oerr, api.Unavailable) || origin.Wait(oerr) > 0 {
			return oerr // the registry asked for a pause
		}
		err = oerr
	}
	if b.ctx.Err() != nil {
		return b.ctx.Err()
	}
	what := "the connection was cut (" + clipText(strings.TrimPrefix(err.Error(), b.c.name+": ")) + ")"
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		what = "the registry ended the transfer early"
	}
	return api.Errorf(api.Unavailable, "%s: layer %s: %d of %d bytes came, and %d tries to get the rest failed: %s",
		b.c.name, b.want.Digest, b.off, b.want.Size, b.c.opts.Resumes, what)
}

// endRequest ends the current request.
func (b *blob) endRequest() {
	if b.body != nil {
		_ = b.body.Close()
		b.body = nil
	}
}

// Close ends the transfer.
func (b *blob) Close() {
	b.endRequest()
	if b.finalError() == nil {
		b.setFailure(api.Errorf(api.Unavailable, "%s: closed", b.c.name))
	}
}
