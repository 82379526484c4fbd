package mover

import (
	"bytes"
	"context"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
	"drover.io/drover/block/suite"
)

// TestResticRestoresOurBackupsFromAnS3Server: backups, a deletion and a sweep in a bucket of a real server leave a
// repository without errors, from which Drover and restic restore the same bytes.
func TestResticRestoresOurBackupsFromAnS3Server(t *testing.T) {
	suite.Long(t) // builds the server
	v := targettest.StartVersity(t)
	t.Setenv("AWS_ACCESS_KEY_ID", v.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", v.SecretKey)
	t.Setenv("AWS_DEFAULT_REGION", v.Region)
	store, err := s3.New(s3.Config{Endpoint: v.Endpoint, Region: v.Region, Bucket: v.Bucket, Prefix: "drover",
		AccessKey: web.Secret(v.AccessKey), SecretKey: web.Secret(v.SecretKey)})
	must(t, err)
	t.Cleanup(func() { must(t, store.Close()) })
	must(t, repo.Init(t.Context(), store, password, repo.Options{}))
	w := &world{TB: t, location: "s3:" + v.Endpoint + "/" + v.Bucket + "/drover",
		store: &hookedStore{Store: store, counts: map[string]int{}}}
	w.open()

	disk := newDisk(70 * chunkSize)
	disk.fill(1, 0, 1, 2, 3, 63, 64, 69)
	first := w.backup(disk, options("v"))
	next := disk.copy(disk.size)
	next.fill(2, 1, 2, 3, 63)
	o := options("v")
	o.Base, o.Changed = &first.Snapshot, []int64{1, 2, 3, 63}
	second := w.backup(next, o)
	w.check()
	before := len(w.packs())
	must(t, w.r.DeleteSnapshots(t.Context(), first.Snapshot))
	_, err = w.r.Sweep(t.Context(), repo.SweepOptions{Empty: true, Threshold: 80})
	must(t, err)
	if after := len(w.packs()); after >= before {
		t.Errorf("%d packs before the sweep, %d after", before, after)
	}
	w.check()
	w.compare(second.Snapshot, next)
	for _, restic := range w.oracles() {
		if got := w.resticRestore(restic, second.Snapshot); !got.equals(next) {
			t.Errorf("%s restores %d other bytes of backup %.8s", restic, got.size, second.Snapshot)
		}
	}
}

// documentedCommands are the commands of restic in docs/backups.md, for a bucket: with the page's form of a bucket for
// the folder's.
func documentedCommands(t *testing.T, server, bucket, path, volume, image string) (commands []string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/backups.md")
	must(t, err)
	forms := regexp.MustCompile("A bucket is `(-r s3:[^`]*)`").FindAllSubmatch(page, -1)
	if len(forms) != 1 {
		t.Fatalf("docs/backups.md has %d forms of a bucket", len(forms))
	}
	form := strings.NewReplacer("SERVER", server, "BUCKET", bucket, "PATH", path).Replace(string(forms[0][1]))
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "restic -r /PATH ") {
			commands = append(commands, strings.NewReplacer("-r /PATH", form, "volumes/V", "volumes/"+volume, "images/I",
				"images/"+image).Replace(strings.TrimSpace(line)))
		}
	}
	return commands
}

// TestDocumentedCommandsReadABucket: the commands of docs/backups.md list, restore and check the backups in a bucket,
// with the keys in the environment.
func TestDocumentedCommandsReadABucket(t *testing.T) {
	suite.Slow(t)
	const bucket, path = "backups", "some/where"
	backend := s3mem.New()
	must(t, backend.CreateBucket(bucket))
	server := httptest.NewTLSServer(gofakes3.New(backend).Server())
	t.Cleanup(server.Close)
	certificate := filepath.Join(t.TempDir(), "server.pem")
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	must(t, os.WriteFile(certificate, ca, 0o600))
	store, err := s3.New(s3.Config{Endpoint: server.URL, Region: "us-east-1", Bucket: bucket, Prefix: path,
		AccessKey: "key", SecretKey: "hush-hush", Network: web.Network{CA: ca}})
	must(t, err)
	t.Cleanup(func() { must(t, store.Close()) })
	must(t, repo.Init(t.Context(), store, password, repo.Options{}))
	w := &world{TB: t, store: &hookedStore{Store: store, counts: map[string]int{}}}
	w.open()
	volume := newDisk(5*chunkSize + 4096)
	volume.fill(1, 0, 2, 5)
	w.backup(volume, options("vol"))
	image := volume.copy(3 * chunkSize)
	delete(image.chunks, 5)
	o := options("golden")
	o.Description.Kind = manifest.Image
	w.backup(image, o)

	commands := documentedCommands(t, strings.TrimPrefix(server.URL, "https://"), bucket, path, "vol", "golden")
	if len(commands) != 4 {
		t.Fatalf("docs/backups.md has the commands %q", commands)
	}
	for _, command := range commands {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", command)
		cmd.Dir, cmd.WaitDelay = t.TempDir(), time.Minute
		cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+password, "AWS_ACCESS_KEY_ID=key",
			"AWS_SECRET_ACCESS_KEY=hush-hush", "SSL_CERT_FILE="+certificate, "RESTIC_CACHE_DIR="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %.2000s", command, err, out)
		}
		var source *disk
		switch {
		case strings.Contains(command, "/volumes/vol"):
			source = volume
		case strings.Contains(command, "/images/golden"):
			source = image
		case strings.Contains(command, " check ") && !strings.Contains(string(out), "no errors were found"):
			t.Errorf("%s: %.2000s", command, out)
		}
		if source == nil {
			continue
		}
		content := make([]byte, source.size)
		_, err = source.ReadAt(content, 0)
		must(t, err)
		if got, err := os.ReadFile(filepath.Join(cmd.Dir, "disk.raw")); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %d other bytes, %v", command, len(got), err)
		}
	}
}
