package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// bucketLatency is how much longer a request takes while a bucket is far.
const bucketLatency = 20 * time.Millisecond

// bucket is a store of this process, in its memory, that speaks S3.
type bucket struct {
	server   *httptest.Server
	far      atomic.Bool
	requests atomic.Int64
	packs    atomic.Int64 // written
}

func newBucket() (*bucket, error) {
	backend := s3mem.New()
	if err := backend.CreateBucket("backups"); err != nil {
		return nil, err
	}
	s, fast := &bucket{}, gofakes3.New(backend).Server()
	s.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/data/") {
			s.packs.Add(1)
		}
		if s.far.Load() {
			time.Sleep(bucketLatency)
		}
		fast.ServeHTTP(w, r)
	}))
	return s, nil
}

// createBucketTarget makes a backup target of the bucket, and waits until it is available.
func (b *bench) createBucketTarget(ctx context.Context, name string, s *bucket) error {
	secret := filepath.Join(b.dir, name+".env")
	text := fmt.Appendf(nil, "AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=hush\nAWS_ENDPOINTS=%s\n"+
		"BACKUP_PASSWORD=bench\n", s.server.URL)
	if err := os.WriteFile(secret, text, 0o600); err != nil {
		return err
	}
	if _, err := runTool(ctx, b.in.drover, "target", "create", name, "s3://backups@us-east-1/",
		"--credentials-file", secret, "--kubeconfig", b.in.kubeconfig); err != nil {
		return err
	}
	_, err := await.Until(ctx, b.in.client, name, func(t *api.BackupTarget) (bool, error) {
		return t.Status.Available, nil
	})
	return err
}

// forgetTarget deletes a backup target and the objects of its backups. The store keeps the backups.
func (b *bench) forgetTarget(ctx context.Context, name string) error {
	_, err := runTool(ctx, b.in.drover, "target", "delete", name, "--force", "--kubeconfig", b.in.kubeconfig)
	return err
}
