// Package upload sends an image file to the node that expects the file, and continues after broken connections. A
// Sender starts no goroutines; its caller closes the Sender.
package upload

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"drover.io/drover/api"
)

// Sender streams a file to a node. After a broken connection the Sender asks the node for the received part, compares
// the part with the file, and sends the rest.
type Sender struct {
	ways []way // the first is in use
	body *os.File
	size int64
	show Progress

	tries int // in a row, without progress at the node
	off   int64
	mine  bool // the last upload at the node was ours
}

// File is a file to send, and the API server that forwards the file if the node is unreachable.
type File struct {
	*os.File
	Server *rest.Config
}

// Progress shows the state of an upload, with the bytes that were sent and those of the file; 0: not known.
type Progress func(state string, done, total int64)

// way is an address that takes the file.
type way struct {
	to   string
	http *http.Client
}

// said is a node's answer about an upload.
type said struct {
	Message string `json:"message"`
	Offset  int64  `json:"offset"`
	CRC32C  uint32 `json:"crc32c"`
	Sending bool   `json:"sending"`
}

const (
	sendTries = 10
	sendPause = 250 * time.Millisecond // doubles, up to
	sendMost  = 10 * time.Second
)

// New sends to an address from the API, whose server has a certificate of the authority (PEM). If the address is
// unreachable, as from another machine, Drover's API server forwards the file.
func New(image, to, authority string, body *File, show Progress) (*Sender, error) {
	st, err := body.Stat()
	if err != nil {
		return nil, err
	}
	trust := &tls.Config{MinVersion: tls.VersionTLS12}
	if authority != "" {
		trust.RootCAs = x509.NewCertPool()
		if !trust.RootCAs.AppendCertsFromPEM([]byte(authority)) {
			return nil, api.Errorf(api.Corrupt, "the authority of the upload's address holds no certificate")
		}
	}
	s := &Sender{body: body.File, size: st.Size(), show: show}
	s.ways = []way{{to, &http.Client{Transport: newTransport(trust)}}}
	if body.Server != nil {
		w, err := throughAPI(body.Server, image)
		if err != nil {
			return nil, err
		}
		s.ways = append(s.ways, w)
	}
	return s, nil
}

func newTransport(trust *tls.Config) *http.Transport {
	return &http.Transport{Proxy: http.ProxyFromEnvironment, ExpectContinueTimeout: time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
		WriteBufferSize:     256 << 10, TLSClientConfig: trust,
		DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext}
}

// throughAPI is the way through the API server, with the credentials of the kubeconfig.
func throughAPI(cfg *rest.Config, image string) (way, error) {
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return way{}, api.Errorf(api.Invalid, "the address of the API server: %w", err)
	}
	trust, err := rest.TLSConfigFor(cfg)
	if err != nil {
		return way{}, api.Errorf(api.Invalid, "the authority of the API server: %w", err)
	}
	tr := newTransport(trust)
	if cfg.Proxy != nil {
		tr.Proxy = cfg.Proxy
	}
	rt, err := rest.HTTPWrappersForConfig(cfg, tr)
	return way{base.JoinPath(api.UploadPath(image)).String(), &http.Client{Transport: rt}}, err
}

// Close closes the idle connections.
func (s *Sender) Close() {
	for _, w := range s.ways {
		w.http.CloseIdleConnections()
	}
}

// Send sends the file, and returns when the node has the file, or when the address expects no upload any more.
func (s *Sender) Send(ctx context.Context) error {
	for first := true; ; first = false {
		answer, code, err := s.putRest(ctx, first)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && code/100 == 2:
			s.show("verifying", 0, 0)
			return nil
		case err == nil && code == http.StatusNotFound:
			err = errGone
		case err == nil && code != http.StatusConflict && code < 500:
			return api.Errorf(api.Other, "the node refuses the upload of %s: %s", s.body.Name(), answer.Message)
		case err == nil:
			err = errors.New(answer.Message)
		}
		s.mine = code != http.StatusConflict
		if gone, err := s.awaitOffset(ctx, err); err != nil || gone {
			return err
		}
	}
}

// errGone means that an address expects no upload.
var errGone = errors.New("the address expects no upload")

// awaitOffset pauses, and asks the node where to continue. gone: the node expects no upload any more. A node that has
// just started does not expect the upload yet.
func (s *Sender) awaitOffset(ctx context.Context, cause error) (gone bool, err error) {
	for ; ; s.tries++ {
		if s.tries >= sendTries && errors.Is(cause, errGone) {
			return true, nil // the upload ended or continues at another address: the image's status decides
		}
		if s.tries >= sendTries {
			return false, api.Errorf(api.Unavailable, "sending %s: %w (%d tries in a row, %s were sent); try the same command "+
				"again", s.body.Name(), cause, s.tries, api.SizeText(s.off))
		}
		t := time.NewTimer(min(sendPause<<s.tries, sendMost))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return false, ctx.Err()
		}
		now, code, err := s.askProgress(ctx)
		switch {
		case ctx.Err() != nil:
			return false, ctx.Err()
		case err != nil:
			cause = err
			continue
		case code == http.StatusNotFound:
			cause = errGone
			continue
		case code != http.StatusOK:
			cause = errors.New(now.Message)
			continue
		}
		if now.Offset > s.off || now.Sending && !s.mine {
			s.tries = 0
		}
		s.off = now.Offset
		s.show("sending", s.off, s.size)
		if now.Sending && !s.mine {
			continue // another Sender is active; the node ends a silent Sender
		}
		s.tries++
		return now.Offset == s.size, s.compareContent(now)
	}
}

// askProgress asks for the progress of the upload: through the current way, else through the other way, which becomes
// current.
func (s *Sender) askProgress(ctx context.Context) (first said, code int, err error) {
	for i := range s.ways {
		req, rerr := http.NewRequestWithContext(ctx, http.MethodGet, s.ways[i].to, nil)
		if rerr != nil {
			return said{}, 0, rerr
		}
		now, c, aerr := s.ways[i].doRequest(req)
		if aerr == nil && c == http.StatusOK {
			s.ways[0], s.ways[i] = s.ways[i], s.ways[0]
			return now, c, nil
		}
		if i == 0 {
			first, code, err = now, c, aerr
		}
	}
	return first, code, err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// compareContent refuses to continue an upload of another file.
func (s *Sender) compareContent(now said) error {
	sum := crc32.New(castagnoli)
	if n, err := io.Copy(sum, io.NewSectionReader(s.body, 0, min(now.Offset, s.size))); err != nil {
		return api.Errorf(api.Other, "image file %s: cannot be read again: %w", s.body.Name(), err)
	} else if n != now.Offset || sum.Sum32() != now.CRC32C {
		return api.Errorf(api.Exists, "the node has %s of another file for this image: delete the image to begin again",
			api.SizeText(now.Offset))
	}
	return nil
}

// putRest sends the rest of the file. The first call gives way to an active sender.
func (s *Sender) putRest(ctx context.Context, first bool) (said, int, error) {
	n := s.size - s.off
	r := &counter{r: io.NewSectionReader(s.body, s.off, n), show: s.show, state: "sending", done: s.off, total: s.size}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, s.ways[0].to, io.NopCloser(r))
	if err != nil {
		return said{}, 0, err
	}
	req.ContentLength = n
	req.Header.Set("Expect", "100-continue")
	if !first && n > 0 {
		req.Header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", s.off, s.size-1, s.size))
	}
	return s.ways[0].doRequest(req)
}

// doRequest sends a request and reads the node's answer.
func (w way) doRequest(req *http.Request) (said, int, error) {
	resp, err := w.http.Do(req)
	if err != nil {
		return said{}, 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return said{}, 0, err
	}
	var a said
	if json.Unmarshal(b, &a) != nil || a.Message == "" && resp.StatusCode/100 != 2 {
		a.Message = strings.TrimSpace(resp.Status + " " + string(b))
	}
	return a, resp.StatusCode, nil
}

// counter reports the bytes read through counter to show.
type counter struct {
	r     io.Reader
	show  Progress
	state string
	done  int64
	total int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.done += int64(n)
	c.show(c.state, c.done, c.total)
	return n, err
}
