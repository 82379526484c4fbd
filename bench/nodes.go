package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// other is a further node on this machine.
type other struct {
	name, dir string
	cmd       *exec.Cmd
}

// startNode starts the node and returns when the disk is ready.
func (o *other) startNode(ctx context.Context, in *instance) error {
	log, err := os.OpenFile(filepath.Join(o.dir, "serve.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	o.cmd = exec.Command(in.drover, "serve", "--roles", "node,data", "--kubeconfig", in.kubeconfig, "--node-name", o.name,
		"--state-dir", filepath.Join(o.dir, "state"), "--disk", filepath.Join(o.dir, "disk"), "--metrics-listen", "off",
		"--node-address", "127.0.0.1")
	o.cmd.Stderr = log
	o.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := o.cmd.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for found := false; !found; { // the first heartbeat creates the Node
		err := in.client.Get(ctx, client.ObjectKey{Name: o.name}, &api.Node{})
		if found = err == nil; !found {
			if client.IgnoreNotFound(err) != nil {
				return err
			}
			if err := sleep(ctx, 50*time.Millisecond); err != nil {
				return fmt.Errorf("node %s does not come: %w", o.name, err)
			}
		}
	}
	_, err = await.Until(ctx, in.client, o.name, func(n *api.Node) (bool, error) {
		return len(n.Status.Disks) > 0 && n.Status.Disks[0].Ready && n.Status.DataAddress != "", nil
	})
	if err != nil {
		return fmt.Errorf("node %s is not ready: %w", o.name, err)
	}
	return nil
}

func (o *other) pid(role string) (int, error) { return pidIn(filepath.Join(o.dir, "state"), role) }

// pidIn returns the pid of a role with a state folder.
func pidIn(state, role string) (int, error) {
	raw, err := os.ReadFile(filepath.Join(state, "run", role+".pid"))
	if err != nil {
		return 0, err
	}
	var of struct {
		Pid int `json:"pid"`
	}
	if err := json.Unmarshal(raw, &of); err != nil {
		return 0, fmt.Errorf("pid file of %s: %w", role, err)
	}
	return of.Pid, nil
}

// stopNode stops the node and all its processes.
func (o *other) stopNode() error {
	if o.cmd == nil {
		return nil
	}
	err := o.cmd.Process.Signal(syscall.SIGTERM)
	_ = o.cmd.Wait() // an error follows from SIGTERM
	o.cmd = nil
	for _, role := range []string{"data", "hold"} {
		if pid, perr := o.pid(role); perr == nil {
			_ = syscall.Kill(pid, syscall.SIGTERM) // the process may have ended already
		}
	}
	return err
}
