// Package s3 is a store in a bucket of Amazon S3 or of a server with the same protocol. The name of an object follows a
// fixed prefix of the bucket.
//
// The store needs little of the protocol, because servers differ: an object is one PUT with Content-MD5, without parts
// and trailers, up to 5 GiB; a read is one GET, and the store compares the answer's range and length with the wanted
// ones; a delete takes 1,000 objects per request.
//
// The library retries a request, with jitter, up to maxTries. Each operation has a deadline: some answer times for the
// tries, and the time that its bytes need on a slow line. A list has the deadline for each page, outside of the
// callback.
//
// No error holds a secret of the configuration, even if a server or proxy repeats the secret. Therefore errors keep the
// text of the library's errors and do not wrap them; only the error of the caller's context is wrapped.
//
// The package starts no goroutines. The HTTP transport keeps goroutines for connections: they end with the request, or
// with Close for idle connections. A request ends after the transport has released its body.
package s3

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/minio/minio-go/v7"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/web"
)

// maxTries is how often the library sends a request.
const maxTries = 4

// Store is a store in a bucket.
type Store struct {
	cfg       Config
	prefix    string // empty, or with a slash at the end
	client    minio.Core
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
	host, secure, err := cfg.endpoint()
	if err != nil {
		return nil, err
	}
	if s.transport, err = cfg.Transport("bucket " + cfg.Bucket); err != nil {
		return nil, err
	}
	login, err := s.login()
	if err != nil {
		return nil, err
	}
	client, err := minio.New(host, &minio.Options{
		Creds:        login,
		Secure:       secure,
		Transport:    web.RoundTripper{Next: s.transport},
		Region:       cfg.Region,
		BucketLookup: cfg.Addressing.lookup(),
		MaxRetries:   maxTries,
	})
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%s: cannot use the endpoint %s: %s", s, host,
			cfg.Redact(err.Error(), cfg.SecretKey, cfg.SessionToken))
	}
	s.client = minio.Core{Client: client}
	return s, nil
}

// Close closes idle connections. Close implements io.Closer and never fails.
func (s *Store) Close() error {
	s.transport.CloseIdleConnections()
	return nil
}

// String names the store in errors.
func (s *Store) String() string {
	return "S3 store " + strings.TrimSuffix(s.cfg.Bucket+"/"+s.prefix, "/")
}

// Put implements target.Store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	if err := target.CheckName(name); err != nil {
		return err
	}
	op := s.begin(ctx, "write object "+name, int64(len(body)))
	defer op.End()
	_, err := s.client.Client.PutObject(op.Ctx, s.cfg.Bucket, s.prefix+name, bytes.NewReader(body), int64(len(body)),
		minio.PutObjectOptions{SendContentMd5: true, DisableMultipart: true, DisableContentSha256: true})
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
	if n == 0 { // no range of the protocol is empty
		return wanted.ReadEmpty(ctx)
	}
	op := s.begin(ctx, "read object "+name, max(n, 0))
	defer op.End()
	var opts minio.GetObjectOptions
	if n > 0 {
		opts.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	} else if off > 0 {
		opts.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	body, info, header, err := s.client.GetObject(op.Ctx, s.cfg.Bucket, s.prefix+name, opts)
	if minio.ToErrorResponse(err).Code == minio.InvalidRange {
		return wanted.ReadEmpty(ctx)
	} else if err != nil {
		return nil, op.failed(err)
	}
	defer body.Close()
	return wanted.ReadAnswer(ctx, op.Operation, body, header.Get("Content-Range"), info.Size)
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (target.Object, error) {
	if err := target.CheckName(name); err != nil {
		return target.Object{}, err
	}
	op := s.begin(ctx, "look up object "+name, 0)
	defer op.End()
	info, err := s.client.StatObject(op.Ctx, s.cfg.Bucket, s.prefix+name, minio.StatObjectOptions{})
	if minio.ToErrorResponse(err).Code == minio.NoSuchKey { // the answer has no body, and may mean the bucket
		if is, e := s.client.BucketExists(op.Ctx, s.cfg.Bucket); e == nil && !is {
			err = minio.ErrorResponse{Code: minio.NoSuchBucket, Message: "the bucket does not exist"}
		}
	}
	if err != nil {
		return target.Object{}, op.failed(err)
	}
	return target.NewObject(name, info.Size, info.LastModified), nil
}

// List implements target.Store.
func (s *Store) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	return s.list(ctx, prefix, true, func(o target.Object) error {
		if target.CheckName(o.Name) != nil {
			return nil
		}
		return each(o)
	})
}

// ListFolders implements target.FolderLister.
func (s *Store) ListFolders(ctx context.Context, prefix string, each func(string) error) error {
	return s.list(ctx, prefix, false, func(o target.Object) error {
		name, ok := strings.CutSuffix(o.Name, "/")
		if !ok || target.CheckName(name) != nil {
			return nil
		}
		return each(strings.TrimPrefix(name, prefix))
	})
}

// list calls each with the objects whose name begins with prefix. If not deep, folders below prefix end in '/', and
// stand for all objects in them.
func (s *Store) list(ctx context.Context, prefix string, deep bool, each func(target.Object) error) error {
	if err := target.CheckPrefix(prefix); err != nil {
		return err
	}
	op := s.begin(ctx, fmt.Sprintf("list objects %q", prefix), 0)
	defer op.End()
	noOwner := false
	for o := range s.client.ListObjectsIter(op.Ctx, s.cfg.Bucket, minio.ListObjectsOptions{
		Prefix: s.prefix + prefix, Recursive: deep, FetchOwner: &noOwner,
	}) {
		if o.Err != nil {
			return op.failed(o.Err)
		}
		name, ok := strings.CutPrefix(o.Key, s.prefix)
		if !ok || !strings.HasPrefix(name, prefix) {
			continue
		}
		op.Pause()
		if err := each(target.NewObject(name, o.Size, o.LastModified)); err != nil {
			return err
		}
		op.Extend(0)
	}
	if err := op.Ctx.Err(); err != nil { // the library ends such a list without an error
		return op.failed(err)
	}
	return nil
}

// Delete implements target.Store. An error of one object does not keep the store from deleting the others.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	objects := make([]minio.ObjectInfo, len(names))
	for i, name := range names {
		if err := target.CheckName(name); err != nil {
			return err
		}
		objects[i].Key = s.prefix + name
	}
	op := s.begin(ctx, "delete objects", 0)
	defer op.End()
	results, err := s.client.RemoveObjectsWithIter(op.Ctx, s.cfg.Bucket, slices.Values(objects),
		minio.RemoveObjectsOptions{})
	if err != nil {
		return op.failed(err)
	}
	var first minio.RemoveObjectResult
	failures := 0
	for r := range results {
		op.Extend(0)
		if r.Err == nil || minio.ToErrorResponse(r.Err).Code == minio.NoSuchKey {
			continue
		}
		if failures++; failures == 1 {
			first = r
		}
	}
	if err := op.Ctx.Err(); err != nil { // the library ends such a delete without an error
		return op.failed(err)
	}
	if failures > 0 {
		op.Action = "delete object " + strings.TrimPrefix(first.ObjectName, s.prefix)
		if failures > 1 {
			op.Action += fmt.Sprintf(" and %d others", failures-1)
		}
		return op.failed(first.Err)
	}
	return nil
}
