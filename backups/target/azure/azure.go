// Package azure is a store in a container of Azure Blob Storage. The name of an object follows a fixed prefix of the
// container.
//
// An object is a block blob, written by one request with a checksum; a read is one GET, and the store compares the
// answer's range and length with the wanted ones. The library retries a request, with jitter, up to maxTries. Each
// operation has a deadline; a list has the deadline for each page, outside of the callback.
//
// No error holds a secret of the configuration, even if a server or proxy repeats the secret. Therefore errors keep the
// code and status of the library's errors and do not wrap them; only the error of the caller's context is wrapped.
//
// The goroutines of a Delete end with the call. The HTTP transport keeps goroutines for connections: they end with the
// request, or with Close for idle connections.
package azure

import (
	"bytes"
	"context"
	"crypto/md5"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/streaming"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blockblob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/web"
)

const (
	// maxTries is how often the library sends a request.
	maxTries = 4
	// deletes is how many objects a Delete deletes at once: a request deletes one.
	deletes = 8
)

// Config says where a store is. The package never reads the environment.
type Config struct {
	Account string
	Key     web.Secret // as Azure shows the key: base64
	// Endpoint is the URL of the account's blob service, such as https://ACCOUNT.blob.core.windows.net.
	Endpoint  string
	Container string
	Prefix    string // of all objects, without slashes at the ends; empty: the whole container
	web.Network
}

// Store is a store in a container.
type Store struct {
	cfg       Config
	prefix    string // empty, or with a slash at the end
	client    *container.Client
	transport *http.Transport
}

var _ target.Store = (*Store)(nil)

// New makes a store, without a request. The caller closes the store.
func New(cfg Config) (*Store, error) {
	cfg.Network = cfg.WithDefaults()
	s := &Store{cfg: cfg}
	if p := strings.Trim(cfg.Prefix, "/"); p != "" {
		if err := target.CheckName(p); err != nil {
			return nil, err
		}
		s.prefix = p + "/"
	}
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		u.Scheme != "http" && u.Scheme != "https" {
		return nil, api.Errorf(api.Invalid, "%s: the endpoint is not a URL like https://ACCOUNT.blob.core.windows.net "+
			"without user and query", s)
	}
	if s.transport, err = cfg.Transport(s.String()); err != nil {
		return nil, err
	}
	key, err := container.NewSharedKeyCredential(cfg.Account, string(cfg.Key))
	if err != nil || cfg.Account == "" || cfg.Key == "" {
		return nil, api.Errorf(api.Invalid, "%s: the account is missing, or the account key is not base64; copy both from "+
			"Azure", s)
	}
	s.client, err = container.NewClientWithSharedKeyCredential(u.JoinPath(cfg.Container).String(), key,
		&container.ClientOptions{ClientOptions: azcore.ClientOptions{
			Transport: &http.Client{Transport: web.RoundTripper{Next: s.transport}},
			Retry: policy.RetryOptions{MaxRetries: maxTries - 1, RetryDelay: 500 * time.Millisecond,
				MaxRetryDelay: 5 * time.Second},
			Telemetry: policy.TelemetryOptions{Disabled: true},
		}})
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%s: cannot use the endpoint: %s", s, cfg.Redact(err.Error(), cfg.Key))
	}
	return s, nil
}

// Close closes idle connections. Close implements io.Closer and never fails.
func (s *Store) Close() error {
	s.transport.CloseIdleConnections()
	return nil
}

// String names the store in errors.
func (s *Store) String() string {
	return "Azure store " + strings.TrimSuffix(s.cfg.Container+"/"+s.prefix, "/")
}

func (s *Store) blob(name string) *blockblob.Client {
	return s.client.NewBlockBlobClient(s.prefix + name)
}

// Put implements target.Store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	if err := target.CheckName(name); err != nil {
		return err
	}
	op := s.begin(ctx, "write object "+name, int64(len(body)))
	defer op.End()
	sum := md5.Sum(body)
	_, err := s.blob(name).Upload(op.Ctx, streaming.NopCloser(bytes.NewReader(body)),
		&blockblob.UploadOptions{TransactionalValidation: blob.TransferValidationTypeMD5(sum[:])})
	if err != nil {
		return op.failed(err)
	}
	return nil
}

// Get implements target.Store.
func (s *Store) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	wanted := web.Range{Store: s, Name: name, Off: off, N: n}
	if err := wanted.Check(); err != nil {
		return nil, err
	}
	if n == 0 { // a range of the library with no bytes means all
		return wanted.ReadEmpty(ctx)
	}
	op := s.begin(ctx, "read object "+name, max(n, 0))
	defer op.End()
	answer, err := s.blob(name).DownloadStream(op.Ctx,
		&blob.DownloadStreamOptions{Range: blob.HTTPRange{Offset: off, Count: max(n, 0)}})
	if isBeyondTheEnd(err) {
		return wanted.ReadEmpty(ctx)
	} else if err != nil {
		return nil, op.failed(err)
	}
	defer answer.Body.Close()
	return wanted.ReadAnswer(ctx, op.Operation, answer.Body, valueOf(answer.ContentRange, ""),
		valueOf(answer.ContentLength, -1))
}

// valueOf is the value of a header, or missing.
func valueOf[T any](header *T, missing T) T {
	if header == nil {
		return missing
	}
	return *header
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (target.Object, error) {
	if err := target.CheckName(name); err != nil {
		return target.Object{}, err
	}
	op := s.begin(ctx, "look up object "+name, 0)
	defer op.End()
	p, err := s.blob(name).GetProperties(op.Ctx, nil)
	if err != nil {
		return target.Object{}, op.failed(err)
	}
	return target.NewObject(name, valueOf(p.ContentLength, 0), valueOf(p.LastModified, time.Time{})), nil
}

// List implements target.Store.
func (s *Store) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if err := target.CheckPrefix(prefix); err != nil {
		return err
	}
	op := s.begin(ctx, fmt.Sprintf("list objects %q", prefix), 0)
	defer op.End()
	whole := s.prefix + prefix
	for pages := s.client.NewListBlobsFlatPager(&container.ListBlobsFlatOptions{Prefix: &whole}); pages.More(); {
		page, err := pages.NextPage(op.Ctx)
		if err != nil {
			return op.failed(err)
		}
		if page.Segment == nil {
			continue
		}
		for _, item := range page.Segment.BlobItems {
			o, ok := s.object(item, prefix)
			if !ok {
				continue
			}
			op.Pause()
			if err := each(o); err != nil {
				return err
			}
			op.Extend(0)
			if op.Ctx.Err() != nil {
				return op.failed(op.Ctx.Err())
			}
		}
	}
	return nil
}

// object is an item of a list, if the item is an object of the store.
func (s *Store) object(item *container.BlobItem, prefix string) (o target.Object, ok bool) {
	if item == nil || item.Name == nil || item.Properties == nil {
		return o, false
	}
	name, ok := strings.CutPrefix(*item.Name, s.prefix)
	if !ok || !strings.HasPrefix(name, prefix) || target.CheckName(name) != nil {
		return o, false
	}
	return target.NewObject(name, valueOf(item.Properties.ContentLength, 0),
		valueOf(item.Properties.LastModified, time.Time{})), true
}

// Delete implements target.Store. An error of one object ends the deletion of the others.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := target.CheckName(name); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return api.Errorf(api.Other, "%s: cannot delete objects: %w", s, err)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(deletes)
	for _, name := range names {
		group.Go(func() error { return s.deleteOne(ctx, name) })
	}
	return group.Wait()
}

func (s *Store) deleteOne(ctx context.Context, name string) error {
	op := s.begin(ctx, "delete object "+name, 0)
	defer op.End()
	include := blob.DeleteSnapshotsOptionTypeInclude
	_, err := s.blob(name).Delete(op.Ctx, &blob.DeleteOptions{DeleteSnapshots: &include})
	if err == nil || isMissing(err) {
		return nil
	}
	return op.failed(err)
}
