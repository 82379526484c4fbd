// Command play starts a cluster of three machines on this computer, for a person, and takes commands that break the
// cluster. The end of play removes the cluster.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/sanity/cluster"
)

func main() {
	cluster.Init()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	bin := flag.String("drover", "bin/drover", "the program")
	nodes := flag.Int("nodes", 3, "how many machines have disks")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	path, err := filepath.Abs(*bin)
	if err != nil {
		return err
	}
	began := time.Now()
	c, err := cluster.Start(ctx, cluster.Options{Binary: path, Nodes: *nodes, Log: os.Stderr})
	if err != nil {
		return err
	}
	defer func() {
		fmt.Fprintln(os.Stdout, "removing the cluster")
		err = errors.Join(err, c.Close())
	}()
	env, err := writeEnv(c, path)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "%d machines are ready after %.1f s. In another terminal:\n\n  . %s\n  drover node list\n"+
		"  kubectl get nodes.storage.drover.io\n"+
		"  on node-1 ip address       # a command on a machine\n\nHere: `help` shows how to break it, Ctrl-C or Ctrl-D "+
		"ends it.\n\n",
		len(c.Machines()), time.Since(began).Seconds(), env)
	lines := make(chan string)
	go func() { // ends with the process
		defer close(lines)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			lines <- in.Text()
		}
	}()
	for {
		fmt.Fprint(os.Stdout, "> ")
		select {
		case line, more := <-lines:
			if !more && isTerminal(os.Stdin) { // Ctrl-D
				fmt.Fprintln(os.Stdout)
				return nil
			}
			if !more { // without a standard input, a signal ends play
				lines = nil
				continue
			}
			if err := do(ctx, c, strings.Fields(line)); err != nil {
				fmt.Fprintln(os.Stdout, err)
			}
		case <-ctx.Done():
			fmt.Fprintln(os.Stdout)
			return nil
		}
	}
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// writeEnv writes the environment of a shell that works with the cluster.
func writeEnv(c *cluster.Cluster, bin string) (string, error) {
	tools := filepath.Join(c.Dir, "bin")
	if err := os.MkdirAll(tools, 0o755); err != nil {
		return "", err
	}
	on := "#!/bin/sh\n# on MACHINE COMMAND...: a command on a machine of the cluster\nm=$1; shift\n" +
		"exec nsenter --target \"$(cat '" + c.Dir + "'/$m/init.pid)\" --net --mount --pid -- \"$@\"\n"
	env := fmt.Sprintf("export KUBECONFIG='%s'\nexport DROVER_KUBECONFIG=\"$KUBECONFIG\" PATH='%s':\"$PATH\"\n",
		c.Kubeconfig, tools)
	path := filepath.Join(c.Dir, "env")
	return path, errors.Join(os.WriteFile(filepath.Join(tools, "on"), []byte(on), 0o755),
		os.Symlink(bin, filepath.Join(tools, "drover")), os.WriteFile(path, []byte(env), 0o600))
}

const help = `machines: control node-1 node-2 ...; roles: serve data hold
  kill MACHINE [ROLE...]     kill -9, without roles of everything; serve MACHINE starts it again
  freeze|thaw MACHINE [ROLE...]
  off|on MACHINE             the power
  serve MACHINE              start the program
  cut A B | isolate A | delay A B 20ms | lose A B 0.1 | heal
  immutable|mutable MACHINE  the files of its first disk
`

// commands lists the commands with the name of a machine.
var commands = []string{"kill", "freeze", "thaw", "off", "on", "serve", "isolate", "immutable", "mutable", "cut",
	"delay", "lose"}

func do(ctx context.Context, c *cluster.Cluster, words []string) error {
	if len(words) == 0 {
		return nil
	}
	find := func(i int) (*cluster.Machine, error) {
		if len(words) <= i {
			return nil, errors.New("which machine?")
		}
		for _, m := range c.Machines() {
			if m.Name == words[i] {
				return m, nil
			}
		}
		return nil, fmt.Errorf("machine %s does not exist", words[i])
	}
	switch words[0] {
	case "help":
		fmt.Fprint(os.Stdout, help)
		return nil
	case "heal":
		c.Net.Heal()
		return nil
	}
	if !slices.Contains(commands, words[0]) {
		return fmt.Errorf("command %s does not exist (see help)", words[0])
	}
	m, err := find(1)
	if err != nil {
		return fmt.Errorf("%w (see help)", err)
	}
	rest := words[2:]
	switch words[0] {
	case "kill":
		return m.Kill(rest...)
	case "freeze":
		return m.Freeze(rest...)
	case "thaw":
		return m.Thaw(rest...)
	case "off":
		return m.PowerOff()
	case "on":
		if err := m.PowerOn(); err != nil {
			return err
		}
		return m.Serve(ctx)
	case "serve":
		return m.Serve(ctx)
	case "isolate":
		c.Net.Isolate(m, c.Machines()...)
		return nil
	case "immutable", "mutable":
		if len(m.Disks) == 0 {
			return fmt.Errorf("machine %s has no disk", m.Name)
		}
		return m.Disks[0].Immutable(words[0] == "immutable")
	}
	other, err := find(2)
	if err != nil {
		return fmt.Errorf("%w (see help)", err)
	}
	var l cluster.Link
	switch {
	case words[0] == "cut":
		l.Cut = true
	case words[0] == "delay" && len(words) > 3:
		if l.Delay, err = time.ParseDuration(words[3]); err != nil {
			return err
		}
	case words[0] == "lose" && len(words) > 3:
		if _, err = fmt.Sscan(words[3], &l.Loss); err != nil {
			return err
		}
	default:
		return errors.New("see help")
	}
	c.Net.Between(m, other, l)
	return nil
}
