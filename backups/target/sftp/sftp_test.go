package sftp

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pkg/sftp"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
	"drover.io/drover/block/suite"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newSigner(t *testing.T) (ssh.Signer, ed25519.PrivateKey) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	signer, err := ssh.NewSignerFromKey(key)
	must(t, err)
	return signer, key
}

// server is an SSH server with one user, me, who logs in with the password hush or the key.
type server struct {
	listener net.Listener
	config   *ssh.ServerConfig
	host     ssh.Signer
	key      ed25519.PrivateKey // the user's
	serve    func(ssh.Channel)

	logins atomic.Int32
	mu     sync.Mutex
	conns  []net.Conn
	wait   sync.WaitGroup
}

// startServer starts a server whose sessions serve runs.
func startServer(t *testing.T, serve func(ssh.Channel)) *server {
	t.Helper()
	s := &server{serve: serve}
	var login ssh.Signer
	s.host, _ = newSigner(t)
	login, s.key = newSigner(t)
	refused := errors.New("refused")
	s.config = &ssh.ServerConfig{
		PasswordCallback: func(c ssh.ConnMetadata, password []byte) (*ssh.Permissions, error) {
			if c.User() != "me" || string(password) != "hush" {
				return nil, refused
			}
			return nil, nil
		},
		PublicKeyCallback: func(c ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			if c.User() != "me" || string(key.Marshal()) != string(login.PublicKey().Marshal()) {
				return nil, refused
			}
			return nil, nil
		},
	}
	s.config.AddHostKey(s.host)
	var err error
	s.listener, err = net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s.wait.Go(func() {
		for {
			conn, err := s.listener.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			s.wait.Go(func() { s.serveConn(conn) })
		}
	})
	t.Cleanup(func() {
		_ = s.listener.Close()
		s.cut()
		s.wait.Wait()
	})
	return s
}

// cut ends all connections.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		_ = c.Close()
	}
}

func (s *server) serveConn(conn net.Conn) {
	defer conn.Close()
	_, channels, requests, err := ssh.NewServerConn(conn, s.config)
	if err != nil {
		return
	}
	s.logins.Add(1)
	go ssh.DiscardRequests(requests)
	for offered := range channels {
		channel, requests, err := offered.Accept()
		if err != nil {
			return
		}
		for r := range requests {
			_ = r.Reply(r.Type == "subsystem", nil)
			if r.Type == "subsystem" {
				break
			}
		}
		go ssh.DiscardRequests(requests)
		s.serve(channel)
		_ = channel.Close()
	}
}

// goServer is the server of the library.
func goServer(channel ssh.Channel) {
	if s, err := sftp.NewServer(channel); err == nil {
		_ = s.Serve()
	}
}

// login is a login by password.
func (s *server) login(root string) Config {
	address := s.listener.Addr().(*net.TCPAddr)
	return Config{Host: "127.0.0.1", Port: fmt.Sprint(address.Port), User: "me", Root: root, Password: "hush",
		KnownHosts: []byte(knownhosts.Line([]string{address.String()}, s.host.PublicKey()))}
}

func open(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := Open(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// TestSFTPKeepsTheContract: an SFTP store passes the contract of stores.
func TestSFTPKeepsTheContract(t *testing.T) {
	suite.Slow(t)
	server := startServer(t, goServer)
	targettest.Run(t, func(t *testing.T) target.Store { return open(t, server.login(t.TempDir())) })
}

// TestSFTPKeepsTheContractWithOpenSSH: the same with OpenSSH's sftp-server, which has fsync.
func TestSFTPKeepsTheContractWithOpenSSH(t *testing.T) {
	suite.Long(t)
	const program = "/usr/lib/openssh/sftp-server"
	if _, err := os.Stat(program); err != nil {
		t.Skip("needs " + program)
	}
	server := startServer(t, func(channel ssh.Channel) {
		cmd := exec.Command(program)
		cmd.Stdout = channel
		in, err := cmd.StdinPipe()
		if err != nil || cmd.Start() != nil {
			return
		}
		_, _ = io.Copy(in, channel)
		_ = in.Close()
		_ = cmd.Wait()
	})
	targettest.Run(t, func(t *testing.T) target.Store {
		s := open(t, server.login(t.TempDir()))
		must(t, s.run(t.Context(), "test", 0, func(o *operation) error {
			if _, has := o.HasExtension(syncExtension); !has {
				t.Error("OpenSSH has no fsync")
			}
			return nil
		}))
		return s
	})
}

// TestObjectsOfAServer: an object is a file below the folder, is replaced whole, and is found by all calls; a missing
// folder is unavailable and never made.
func TestObjectsOfAServer(t *testing.T) {
	server, root := startServer(t, goServer), t.TempDir()
	s := open(t, server.login(root))
	body := targettest.Body(100_001, 1)
	must(t, s.Put(t.Context(), "data/ab/a", []byte("first")))
	must(t, s.Put(t.Context(), "data/ab/a", body))
	if got, err := os.ReadFile(filepath.Join(root, "data/ab/a")); err != nil || string(got) != string(body) {
		t.Errorf("the file has %d bytes, %v", len(got), err)
	}
	got, err := s.Get(t.Context(), "data/ab/a", 50_000, 1000)
	if err != nil || string(got) != string(body[50_000:51_000]) {
		t.Errorf("a range: %d bytes, %v", len(got), err)
	}
	if _, err := s.Get(t.Context(), "data/ab/a", 100_000, 2); !api.Is(err, api.Invalid) {
		t.Errorf("beyond the end: %v", err)
	}
	for _, name := range []string{"data/ab", "data/ab/a/b", "config"} {
		if _, err := s.Get(t.Context(), name, 0, -1); !api.Is(err, api.NotFound) {
			t.Errorf("get %s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if got := targettest.List(t, s, ""); len(got) != 1 || got["data/ab/a"].Size != int64(len(body)) {
		t.Errorf("the list has %v", got)
	}
	must(t, s.Delete(t.Context(), "data/ab", "data/ab/a", "none"))
	must(t, os.RemoveAll(filepath.Join(root, "data")))
	must(t, s.Put(t.Context(), "data/ab/b", nil)) // the folders are missing again
	must(t, os.Symlink("b", filepath.Join(root, "data/ab/link")))
	if err := s.List(t.Context(), "", func(target.Object) error { return nil }); !api.Is(err, api.Unsupported) {
		t.Errorf("a symbolic link: %v", err)
	}
	must(t, os.RemoveAll(root))
	for name, err := range map[string]error{
		"put": s.Put(t.Context(), "a", nil), "list": s.List(t.Context(), "", func(target.Object) error { return nil }),
		"delete": s.Delete(t.Context(), "a"),
	} {
		if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "the folder does not exist") {
			t.Errorf("%s without the folder: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("the folder exists again: %v", err)
	}
}

// TestKeyOfTheServerMustBeKnown: a server with another key than the known one, and a server that no line names, are
// refused before the password is sent.
func TestKeyOfTheServerMustBeKnown(t *testing.T) {
	server, root := startServer(t, goServer), t.TempDir()
	other, _ := newSigner(t)
	cfg := server.login(root)
	cfg.KnownHosts = []byte(knownhosts.Line([]string{server.listener.Addr().String()}, other.PublicKey()))
	if _, err := Open(t.Context(), cfg); !api.Is(err, api.Denied) || !strings.Contains(err.Error(), "another key") {
		t.Errorf("another key: %v", err)
	}
	for name, lines := range map[string]string{
		"no line": "# nothing\n", "another host": knownhosts.Line([]string{"example.com"}, server.host.PublicKey()),
		"no key": "127.0.0.1 hush\n", "empty": "",
	} {
		cfg.KnownHosts = []byte(lines)
		if _, err := Open(t.Context(), cfg); !api.Is(err, api.Invalid) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
	}
	if n := server.logins.Load(); n != 0 {
		t.Errorf("the server had %d logins", n)
	}
}

// TestLogins: a password, a key and an encrypted key log in; wrong ones are denied, unreadable ones invalid, and no
// error or format shows a secret.
func TestLogins(t *testing.T) {
	server, root := startServer(t, goServer), t.TempDir()
	plain, err := ssh.MarshalPrivateKey(server.key, "")
	must(t, err)
	sealed, err := ssh.MarshalPrivateKeyWithPassphrase(server.key, "", []byte("hush-phrase"))
	must(t, err)
	_, stranger := newSigner(t)
	strange, err := ssh.MarshalPrivateKey(stranger, "")
	must(t, err)
	const good = api.Other
	text := func(b *pem.Block) web.Secret { return web.Secret(pem.EncodeToMemory(b)) }
	for name, c := range map[string]struct {
		password, key, phrase web.Secret
		kind                  api.Kind
	}{
		"password": {"hush", "", "", good}, "key": {"", text(plain), "", good},
		"encrypted key":  {"", text(sealed), "hush-phrase", good},
		"wrong password": {"hush-hush", "", "", api.Denied}, "foreign key": {"", text(strange), "", api.Denied},
		"wrong passphrase": {"", text(sealed), "hush-hush", api.Invalid},
		"no passphrase":    {"", text(sealed), "", api.Invalid},
		"no key":           {"", "hush", "", api.Invalid}, "nothing": {"", "", "", api.Invalid},
	} {
		cfg := server.login(root)
		cfg.Password, cfg.PrivateKey, cfg.Passphrase = c.password, c.key, c.phrase
		s, err := Open(t.Context(), cfg)
		if err == nil {
			must(t, s.Close())
		}
		if (err == nil) != (c.kind == good) || err != nil && (!api.Is(err, c.kind) || strings.Contains(err.Error(), "hush")) {
			t.Errorf("%s: %v of kind %v", name, err, api.KindOf(err))
		}
		if text := fmt.Sprintf("%v %+v %#v", cfg, cfg, cfg); strings.Contains(text, "hush") {
			t.Errorf("%s: a format shows a secret: %s", name, text)
		}
	}
}

// TestLostConnectionIsReplaced: an operation on a lost connection fails as unavailable, and the next one makes a new
// connection.
func TestLostConnectionIsReplaced(t *testing.T) {
	server := startServer(t, goServer)
	s := open(t, server.login(t.TempDir()))
	must(t, s.Put(t.Context(), "a", []byte("a")))
	server.cut()
	if _, err := s.Get(t.Context(), "a", 0, -1); err != nil && !api.Is(err, api.Unavailable) {
		t.Errorf("get on a lost connection: %v of kind %v", err, api.KindOf(err))
	}
	if got, err := s.Get(t.Context(), "a", 0, -1); err != nil || string(got) != "a" {
		t.Errorf("get: %q, %v", got, err)
	}
	if n := server.logins.Load(); n != 2 {
		t.Errorf("the server had %d logins, want 2", n)
	}
}

// TestServerThatHangsIsUnavailable: an operation of a server that does not answer ends with its deadline, or with the
// context of the caller.
func TestServerThatHangsIsUnavailable(t *testing.T) {
	release := make(chan struct{})
	server := startServer(t, func(ssh.Channel) { <-release })
	t.Cleanup(func() { close(release) })
	cfg := server.login(t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("open with a context that ends: %v", err)
	}
	cfg.AnswerTime = 50 * time.Millisecond
	if _, err := Open(t.Context(), cfg); !api.Is(err, api.Unavailable) {
		t.Errorf("open: %v", err)
	}
}

// TestListsAreBounded: the list of a folder that is longer than the bound, alone or together with the folders above, is
// an error of the folder, and the store works on.
func TestListsAreBounded(t *testing.T) {
	server, root := startServer(t, goServer), t.TempDir()
	s := open(t, server.login(root))
	for _, dir := range []string{"", "data", "data/ab"} {
		for i := range 40 {
			must(t, os.MkdirAll(filepath.Join(root, dir), 0o700))
			must(t, os.WriteFile(filepath.Join(root, dir, fmt.Sprint(i, strings.Repeat("x", 200))), nil, 0o600))
		}
	}
	list := func() (n int, err error) {
		return n, s.List(t.Context(), "", func(target.Object) error { n++; return nil })
	}
	for most, want := range map[int64]string{8 << 10: "list of folder " + root + ":", 30 << 10: "list of folder " + root +
		"/data:", 50 << 10: "list of folder " + root + "/data/ab:"} {
		s.most = most
		_, err := list()
		if !api.Is(err, api.Unavailable) || !errors.Is(err, errTooLong) || !strings.Contains(err.Error(), want) {
			t.Errorf("with a bound of %d: %v of kind %v, want %q", most, err, api.KindOf(err), want)
		}
	}
	s.most = 70 << 10
	if n, err := list(); n != 120 || err != nil {
		t.Errorf("with room for all: %d objects, %v", n, err)
	}
}

// TestAbandonedFilesAreRemoved: Open removes temporary files of a day ago, and no younger ones.
func TestAbandonedFilesAreRemoved(t *testing.T) {
	server, root := startServer(t, goServer), t.TempDir()
	must(t, os.Mkdir(filepath.Join(root, tmpDir), 0o700))
	old, young := filepath.Join(root, tmpDir, "old"), filepath.Join(root, tmpDir, "young")
	for _, file := range []string{old, young} {
		must(t, os.WriteFile(file, nil, 0o600))
	}
	past := time.Now().Add(-abandonedAfter - time.Hour)
	must(t, os.Chtimes(old, past, past))
	open(t, server.login(root))
	entries, err := os.ReadDir(filepath.Join(root, tmpDir))
	must(t, err)
	if len(entries) != 1 || entries[0].Name() != "young" {
		t.Errorf("the folder has %v", entries)
	}
}
